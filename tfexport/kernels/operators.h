// The operators, compiled for one target. `kernels.cpp` includes this file once for each, with these macros:
//   TARGET               the namespace and name of the target
//   TARGET_FLAGS         what the compiler may use
//   TARGET_HAS_PRODUCTS  whether it has kernels for matrix products
//   TARGET_...           the instructions that `registers.h` distinguishes

#define TARGET_PRAGMA(text) _Pragma(#text)
#define TARGET_EXPANDED(text) TARGET_PRAGMA(text)
#if defined(__clang__)
TARGET_EXPANDED(clang attribute push(__attribute__((target(TARGET_FLAGS))), apply_to = function))
#define INLINED_LAMBDA __attribute__((always_inline, target(TARGET_FLAGS)))
#else
#pragma GCC push_options
TARGET_EXPANDED(GCC target TARGET_FLAGS)
#define INLINED_LAMBDA __attribute__((always_inline))
#endif

#include "floats.h"
#include "rows.h"
#include "attention.h"
#include "screening.h"
#include "registers.h"
#include "products.h"

namespace tfexport::TARGET {

// Adds the operators to a domain. Returns the error, if any.
inline OrtStatus* add_operators(const OrtApi* api, OrtCustomOpDomain* domain) {
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
#if TARGET_HAS_PRODUCTS
      {"Linear", linear<false>, {kFloat, kFloat, kFloat}, {kFloat}},
      {"LinearRectified", linear<true>, {kFloat, kFloat, kFloat}, {kFloat}},
      {"Int8Linear", int8_linear<false>, {kFloat, kInt8, kFloat, kFloat}, {kFloat}},
      {"Int8LinearRectified", int8_linear<true>, {kFloat, kInt8, kFloat, kFloat}, {kFloat}},
      {"ScreenProduct", screen_product, {kUint8, kInt8, kFloat, kFloat}, {kFloat}},
#endif
  };
  OrtStatus* failed = nullptr;
  for (Operator& op : operators) {
    if (!failed) failed = call(api, kCustomOpDomain_Add, domain, static_cast<const OrtCustomOp*>(&op));
  }
  return failed;
}

}  // namespace tfexport::TARGET

#undef INLINED_LAMBDA
#undef TARGET_PRAGMA
#undef TARGET_EXPANDED
#undef TARGET
#undef TARGET_FLAGS
#undef TARGET_HAS_PRODUCTS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
