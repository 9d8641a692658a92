// The registers of a target, as matrix products use them. A target is an instruction set; `kernels.cpp` lists them.
//
// For float32: `FloatRegister` with `kFloatLanes` outputs, and a fused multiplication and addition.
// For 8 bits: `Sums` of `kDotOutputs` outputs. `add_products` adds the products of four inputs, exactly. A row's four inputs are
// stored as `Number`s, as the target's instruction wants them.
#if TARGET_HAS_PRODUCTS

namespace tfexport::TARGET {

constexpr int64_t kGroup = 4;  // inputs with adjacent weights, in 8 bits

#if defined(TARGET_AVX512)

typedef __m512 FloatRegister;
constexpr int kFloatLanes = 16;
constexpr int kRegisters = 32;
constexpr int kMostRows = 8;

INLINED FloatRegister no_floats() { return _mm512_setzero_ps(); }
INLINED FloatRegister load_register(const float* from) { return _mm512_loadu_ps(from); }
INLINED void store_register(float* to, FloatRegister x) { _mm512_storeu_ps(to, x); }
INLINED FloatRegister rectified(FloatRegister x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }  // this order keeps NaN
INLINED FloatRegister multiply_add(FloatRegister a, FloatRegister b, FloatRegister sum) { return _mm512_fmadd_ps(a, b, sum); }

// In assembly, because GCC loads all rows before the first multiplication, which needs too many registers and halves the speed.
INLINED FloatRegister broadcast(const float* from) {
  FloatRegister x;
  asm volatile("vbroadcastss %1, %0" : "=v"(x) : "m"(*from));
  return x;
}

#elif defined(TARGET_AVX2)

typedef __m256 FloatRegister;
constexpr int kFloatLanes = 8;
constexpr int kRegisters = 16;
constexpr int kMostRows = 6;

INLINED FloatRegister no_floats() { return _mm256_setzero_ps(); }
INLINED FloatRegister load_register(const float* from) { return _mm256_loadu_ps(from); }
INLINED void store_register(float* to, FloatRegister x) { _mm256_storeu_ps(to, x); }
INLINED FloatRegister rectified(FloatRegister x) { return _mm256_max_ps(_mm256_setzero_ps(), x); }
INLINED FloatRegister multiply_add(FloatRegister a, FloatRegister b, FloatRegister sum) { return _mm256_fmadd_ps(a, b, sum); }

INLINED FloatRegister broadcast(const float* from) {
  FloatRegister x;
  asm volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*from));
  return x;
}

#elif defined(TARGET_NEON)

typedef float32x4_t FloatRegister;
constexpr int kFloatLanes = 4;
constexpr int kRegisters = 32;
constexpr int kMostRows = 8;

INLINED FloatRegister no_floats() { return vdupq_n_f32(0); }
INLINED FloatRegister load_register(const float* from) { return vld1q_f32(from); }
INLINED void store_register(float* to, FloatRegister x) { vst1q_f32(to, x); }
INLINED FloatRegister rectified(FloatRegister x) { return vmaxq_f32(vdupq_n_f32(0), x); }  // NaN stays NaN
INLINED FloatRegister multiply_add(FloatRegister a, FloatRegister b, FloatRegister sum) { return vfmaq_f32(sum, a, b); }
INLINED FloatRegister broadcast(const float* from) { return vld1q_dup_f32(from); }

#endif

#if defined(TARGET_VNNI)

// The instruction multiplies unsigned numbers by signed ones. If the rows are signed, weights become unsigned by adding 128
// (flipping a bit), and each sum starts at -128 times the sum of its row.
typedef uint8_t Number;
constexpr bool kFlipsWeights = true, kShiftsRectified = false;
constexpr int kDotExtraRegisters = 1;

#if defined(TARGET_AVX512)

typedef __m512i Sums, Weights, InputGroup;
typedef __m512 DotFloats;

INLINED Sums first_sums(int32_t start) { return _mm512_set1_epi32(start); }
INLINED InputGroup broadcast(const Number* from) {
  InputGroup four;
  asm volatile("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t*>(from)));
  return four;
}
template <bool kRectified>
INLINED Weights load_weights(const int8_t* from) {
  const __m512i weights = _mm512_loadu_si512(from);
  return kRectified ? weights : _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
}
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
  if (kRectified) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(four), "v"(weights));
  } else {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(four));
  }
  return sums;
}
INLINED DotFloats to_floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }

#else

typedef __m256i Sums, Weights, InputGroup;
typedef __m256 DotFloats;

INLINED Sums first_sums(int32_t start) { return _mm256_set1_epi32(start); }
INLINED InputGroup broadcast(const Number* from) {
  InputGroup four;
  asm volatile("vpbroadcastd %1, %0" : "=x"(four) : "m"(*reinterpret_cast<const int32_t*>(from)));
  return four;
}
template <bool kRectified>
INLINED Weights load_weights(const int8_t* from) {
  const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return kRectified ? weights : _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
}
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
  if (kRectified) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(four), "x"(weights));
  } else {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(four));
  }
  return sums;
}
INLINED DotFloats to_floats(Sums sums) { return _mm256_cvtepi32_ps(sums); }

#endif

#elif defined(TARGET_AVX512) || defined(TARGET_AVX2)

// Products of 8 bits in pairs of 16 bits, whose sums never saturate: rows have 16 bits, and weights are extended when they are
// loaded. `Sums` has two sums of each output.
typedef int16_t Number;
constexpr bool kFlipsWeights = false, kShiftsRectified = false;
constexpr int kDotExtraRegisters = 2;

#if defined(TARGET_AVX512)

typedef __m512i Sums, Weights, InputGroup;
typedef __m256 DotFloats;

INLINED Sums first_sums(int32_t) { return _mm512_setzero_si512(); }
INLINED InputGroup broadcast(const Number* from) {
  InputGroup four;
  asm volatile("vpbroadcastq %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int64_t*>(from)));
  return four;
}
template <bool kRectified>
INLINED Weights load_weights(const int8_t* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
  Sums pairs;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(pairs) : "v"(four), "v"(weights));
  return sums;
}
INLINED DotFloats to_floats(Sums sums) {
  return _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(_mm512_add_epi32(sums, _mm512_srli_epi64(sums, 32))));
}

#else

typedef __m256i Sums, Weights, InputGroup;
typedef __m128 DotFloats;

INLINED Sums first_sums(int32_t) { return _mm256_setzero_si256(); }
INLINED InputGroup broadcast(const Number* from) {
  InputGroup four;
  asm volatile("vpbroadcastq %1, %0" : "=x"(four) : "m"(*reinterpret_cast<const int64_t*>(from)));
  return four;
}
template <bool kRectified>
INLINED Weights load_weights(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
  Sums pairs;  // in assembly, because GCC multiplies far ahead of the additions, and spills registers
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(four), "x"(weights));
  return sums;
}
INLINED DotFloats to_floats(Sums sums) {
  return _mm_cvtepi32_ps(_mm_hadd_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}

#endif

#elif defined(TARGET_NEON)

// Rows are signed. Without an instruction for unsigned rows, rows after a ReLU are stored less 128, and 128 times the sums of the
// weights are added.
typedef int8_t Number;
constexpr bool kFlipsWeights = false;
constexpr int kDotExtraRegisters = 3;
#if defined(TARGET_I8MM)
constexpr bool kShiftsRectified = false;
#else
constexpr bool kShiftsRectified = true;
#endif

typedef float32x4_t DotFloats;
typedef int8x16_t Weights, InputGroup;

INLINED InputGroup broadcast(const Number* from) {
  return vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(from)));
}
template <bool kRectified>
INLINED Weights load_weights(const int8_t* from) { return vld1q_s8(from); }

#if defined(TARGET_DOTPROD)

typedef int32x4_t Sums;

INLINED Sums first_sums(int32_t) { return vdupq_n_s32(0); }
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
#if defined(TARGET_I8MM)
  if (kRectified) return vusdotq_s32(sums, vreinterpretq_u8_s8(four), weights);
#endif
  return vdotq_s32(sums, weights, four);
}
INLINED DotFloats to_floats(Sums sums) { return vcvtq_f32_s32(sums); }
INLINED Sums add_times_128(Sums sums, Sums more) { return vaddq_s32(sums, vshlq_n_s32(more, 7)); }

#else

typedef int32x4x2_t Sums;  // two sums of each output

INLINED Sums first_sums(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
template <bool kRectified>
INLINED Sums add_products(InputGroup four, Weights weights, Sums sums) {
  sums.val[0] = vpadalq_s16(sums.val[0], vmull_s8(vget_low_s8(weights), vget_low_s8(four)));
  sums.val[1] = vpadalq_s16(sums.val[1], vmull_high_s8(weights, four));
  return sums;
}
INLINED DotFloats to_floats(Sums sums) { return vcvtq_f32_s32(vpaddq_s32(sums.val[0], sums.val[1])); }
INLINED Sums add_times_128(Sums sums, Sums more) {
  for (int i = 0; i < 2; ++i) sums.val[i] = vaddq_s32(sums.val[i], vshlq_n_s32(more.val[i], 7));
  return sums;
}

#endif
#endif

#if !defined(TARGET_NEON)
INLINED Sums add_times_128(Sums sums, Sums) { return sums; }  // no rows are shifted
#endif

constexpr int kDotOutputs = sizeof(DotFloats) / sizeof(float);
constexpr int kFloatExtraRegisters = 1;  // as `kDotExtraRegisters`: registers of a tile beside sums, and weights or rows

INLINED DotFloats load_factors(const float* from) {
  DotFloats factors;
  __builtin_memcpy(&factors, from, sizeof factors);
  return factors;
}

}  // namespace tfexport::TARGET

#endif
