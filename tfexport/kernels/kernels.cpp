// Operators of ONNX Runtime's CPU provider for the functions of the dialect `ort`. The definitions in a graph define the
// result of each function. A session with this library uses the operators instead of the definitions.

#include "attention.h"
#include "beams.h"
#include "products.h"
#include "rows.h"
#include "runtime.h"
#include "screening.h"

using namespace tfexport;

constexpr int kBundleFormat = 6;  // of the bundles whose functions these are

extern "C" __attribute__((visibility("default"))) int tfexport_bundle_format() { return kBundleFormat; }

extern "C" __attribute__((visibility("default"))) int tfexport_has_products() { return has_products(); }

extern "C" __attribute__((visibility("default"))) const char* tfexport_instruction_sets() { return instruction_sets(); }

extern "C" __attribute__((visibility("default"))) void tfexport_begin_beams(const Beams* beams) { see_next_slots(*beams); }

// Returns whether the caller decides about the next step; -1 if there is not enough memory.
extern "C" __attribute__((visibility("default"))) int tfexport_advance_beams(const Beams* beams, int64_t step, int is_last) {
  try {
    return advance(*beams, step, is_last != 0);
  } catch (const std::exception&) {  // no exception may leave a function that C calls
    return -1;
  }
}

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  static Operator operators[] = {
      {"GreedyAttention", self_attention<int32_t, false>, {kFloat, kFloat, kFloat, kInt32, kInt32}, {kFloat, kFloat, kFloat}},
      {"BeamAttention", self_attention<int64_t, true>, {kFloat, kFloat, kFloat, kInt64, kBool}, {kFloat, kFloat, kFloat}},
      {"CrossAttention", cross_attention, {kFloat, kFloat, kFloat, kInt32}, {kFloat}},
      {"SourceAttention", source_attention, {kFloat, kFloat, kFloat, kInt32}, {kFloat}},
      {"ResidualNorm", residual_norm, {kFloat, kFloat, kFloat, kFloat}, {kFloat, kFloat}, "epsilon"},
      {"ScreenStates", screen_states, {kFloat, kFloat, kFloat}, {kUint8, kFloat, kFloat}},
      {"ScreenBest", screen_best, {kFloat, kFloat, kFloat, kFloat, kFloat, kInt64}, {kFloat, kInt64}},
      {"BestToken", best_token, {kFloat, kInt64}, {kFloat, kInt64}},
      {"BestTokens", best_tokens, {kFloat, kInt64}, {kFloat, kInt64}},
  };
#if defined(__x86_64__)
  static Operator products[] = {
      {"Linear", linear<false>, {kFloat, kFloat, kFloat}, {kFloat}},
      {"LinearRectified", linear<true>, {kFloat, kFloat, kFloat}, {kFloat}},
      {"Int8Linear", int8_linear<false>, {kFloat, kInt8, kFloat, kFloat}, {kFloat}},
      {"Int8LinearRectified", int8_linear<true>, {kFloat, kInt8, kFloat, kFloat}, {kFloat}},
      {"ScreenProduct", screen_product, {kUint8, kInt8, kFloat, kFloat}, {kFloat}},
  };
#endif
  const OrtApi* api = base->GetApi(kVersion);
  static OrtCustomOpDomain* const domain = [api] {
    OrtCustomOpDomain* made = nullptr;
    if (api == nullptr) return made;  // an ONNX Runtime that is older
    OrtStatus* failed = call(api, kCreateCustomOpDomain, "tfexport", &made);
    const auto add = [&](Operator& op) {
      if (!failed) failed = call(api, kCustomOpDomain_Add, made, static_cast<const OrtCustomOp*>(&op));
    };
    for (Operator& op : operators) add(op);
#if defined(__x86_64__)
    if (has_products()) {
      for (Operator& op : products) add(op);
    }
#endif
    return failed ? nullptr : made;
  }();
  if (api == nullptr) return call(base->GetApi(1), kCreateStatus, 1, "ONNX Runtime is older than 1.24");
  if (domain == nullptr) return call(api, kCreateStatus, 1, "the operators cannot be registered");
  return call(api, kAddCustomOpDomain, options, domain);
}
