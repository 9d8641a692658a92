// Operators of ONNX Runtime's CPU provider for the functions of the dialect `ort`, whose definitions in a graph say what each
// computes. A session for which this library is registered takes them instead of the definitions.

#include "attention.h"
#include "rows.h"
#include "runtime.h"
#include "screening.h"

using namespace tfexport;

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  static Operator operators[] = {
      {"GreedyAttention", self_attention<int32_t, false>, {kFloat, kFloat, kFloat, kInt32, kInt32}, {kFloat, kFloat, kFloat}},
      {"BeamAttention", self_attention<int64_t, true>, {kFloat, kFloat, kFloat, kInt64, kBool}, {kFloat, kFloat, kFloat}},
      {"CrossAttention", cross_attention, {kFloat, kFloat, kFloat, kInt32}, {kFloat}},
      {"ResidualNorm", residual_norm, {kFloat, kFloat, kFloat, kFloat}, {kFloat, kFloat}, "epsilon"},
      {"RowQuantize", row_quantize<false>, {kFloat}, {kUint8, kFloat}},
      {"RowQuantizeRectified", row_quantize<true>, {kFloat}, {kUint8, kFloat}},
      {"RowScale", row_scale, {kFloat, kFloat, kFloat}, {kFloat}},
      {"ScreenStates", screen_states, {kFloat, kFloat, kFloat}, {kUint8, kFloat, kFloat}},
      {"ScreenBest", screen_best, {kFloat, kFloat, kFloat, kFloat, kFloat}, {kFloat, kInt64}},
      {"BestToken", best_token, {kFloat, kInt64}, {kFloat, kInt64}},
      {"BestTokens", best_tokens, {kFloat, kInt64}, {kFloat, kInt64}},
  };
  const OrtApi* api = base->GetApi(kVersion);
  static OrtCustomOpDomain* const domain = [api] {
    OrtCustomOpDomain* made = nullptr;
    if (api == nullptr) return made;  // an ONNX Runtime that is older
    OrtStatus* failed = call(api, kCreateCustomOpDomain, "tfexport", &made);
    for (Operator& op : operators) {
      if (!failed) failed = call(api, kCustomOpDomain_Add, made, static_cast<const OrtCustomOp*>(&op));
    }
    return failed ? nullptr : made;
  }();
  if (api == nullptr) return nullptr;
  if (domain == nullptr) return call(api, kCreateStatus, 1, "the operators cannot be registered");
  return call(api, kAddCustomOpDomain, options, domain);
}
