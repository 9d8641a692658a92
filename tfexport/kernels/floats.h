// Vectors of sixteen floats, in as many registers as a target needs for them. Results have the same bits on all CPUs: sums have one
// order, and the compiler does not fuse multiplications and additions, which not all CPUs can do (-ffp-contract=off). In 8 bits the
// last bit of an activation decides how it is rounded, and so which tokens are found. Exceptions are the float32 products, which
// fuse and only run on CPUs that can, and the log-probabilities of `BestTokens`, which call the system's exp and log.

namespace tfexport::TARGET {

constexpr int kLanes = 16;

// Compilers compute vectors that are wider than a register lane by lane, so the registers are listed here.
#if defined(TARGET_AVX512)
constexpr int kRegisterLanes = 16;
#elif defined(TARGET_AVX2)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kPieces = kLanes / kRegisterLanes;

typedef float FloatPiece __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t IntPiece __attribute__((vector_size(4 * kRegisterLanes)));
typedef float Quarter __attribute__((vector_size(16)));
// The type of memory, which has any alignment.
typedef float FloatsInMemory __attribute__((vector_size(4 * kRegisterLanes), aligned(4), may_alias));
typedef int32_t IntsInMemory __attribute__((vector_size(4 * kRegisterLanes), aligned(4), may_alias));

#define EACH_PIECE for (int i = 0; i < kPieces; ++i)

struct Ints {
  IntPiece piece[kPieces];
};
struct Floats {
  FloatPiece piece[kPieces];
};

#define FOR_PIECES(Result, expression) \
  Result result;                      \
  EACH_PIECE result.piece[i] = expression; \
  return result

INLINED Floats load(const float* from) {
  FOR_PIECES(Floats, *reinterpret_cast<const FloatsInMemory*>(from + i * kRegisterLanes));
}
INLINED void store(float* to, Floats x) { EACH_PIECE *reinterpret_cast<FloatsInMemory*>(to + i * kRegisterLanes) = x.piece[i]; }
INLINED void store(int32_t* to, Ints x) { EACH_PIECE *reinterpret_cast<IntsInMemory*>(to + i * kRegisterLanes) = x.piece[i]; }
INLINED Floats all(float number) { FOR_PIECES(Floats, FloatPiece{} + number); }
INLINED Ints all(int32_t number) { FOR_PIECES(Ints, IntPiece{} + number); }

INLINED Floats operator+(Floats a, Floats b) { FOR_PIECES(Floats, a.piece[i] + b.piece[i]); }
INLINED Floats operator-(Floats a, Floats b) { FOR_PIECES(Floats, a.piece[i] - b.piece[i]); }
INLINED Floats operator*(Floats a, Floats b) { FOR_PIECES(Floats, a.piece[i] * b.piece[i]); }
INLINED Floats operator/(Floats a, Floats b) { FOR_PIECES(Floats, a.piece[i] / b.piece[i]); }
INLINED Floats operator+(Floats a, float b) { return a + all(b); }
INLINED Floats operator-(Floats a, float b) { return a - all(b); }
INLINED Floats operator*(Floats a, float b) { return a * all(b); }
INLINED Floats operator*(float a, Floats b) { return all(a) * b; }
INLINED Floats operator/(Floats a, float b) { return a / all(b); }
INLINED Floats& operator+=(Floats& a, Floats b) { return a = a + b; }
INLINED Floats& operator*=(Floats& a, float b) { return a = a * b; }

// -1 where a comparison is true, else 0.
INLINED Ints operator<(Floats a, float b) { FOR_PIECES(Ints, a.piece[i] < b); }
INLINED Ints operator<=(Floats a, float b) { FOR_PIECES(Ints, a.piece[i] <= b); }
INLINED Ints operator<(Ints a, int32_t b) { FOR_PIECES(Ints, a.piece[i] < b); }
INLINED Ints operator!=(Floats a, Floats b) { FOR_PIECES(Ints, a.piece[i] != b.piece[i]); }
INLINED Ints operator~(Ints a) { FOR_PIECES(Ints, ~a.piece[i]); }
INLINED Ints operator+(Ints a, int32_t b) { FOR_PIECES(Ints, a.piece[i] + b); }
INLINED Ints& operator+=(Ints& a, Ints b) {
  EACH_PIECE a.piece[i] += b.piece[i];
  return a;
}
INLINED Ints& operator|=(Ints& a, Ints b) {
  EACH_PIECE a.piece[i] |= b.piece[i];
  return a;
}

INLINED Floats select(Ints truth, Floats a, Floats b) { FOR_PIECES(Floats, truth.piece[i] ? a.piece[i] : b.piece[i]); }
INLINED Floats larger(Floats a, Floats b) { FOR_PIECES(Floats, a.piece[i] > b.piece[i] ? a.piece[i] : b.piece[i]); }
INLINED Floats magnitude(Floats a) {
  FOR_PIECES(Floats, reinterpret_cast<FloatPiece>(reinterpret_cast<IntPiece>(a.piece[i]) & 0x7fffffff));
}
// Without the fraction.
INLINED Ints to_ints(Floats a) { FOR_PIECES(Ints, __builtin_convertvector(a.piece[i], IntPiece)); }
// 2 to the power of `exponents`, from -126 to 127.
INLINED Floats powers_of_two(Ints exponents) {
  FOR_PIECES(Floats, reinterpret_cast<FloatPiece>((exponents.piece[i] + 127) << 23));
}

INLINED void store_bytes(uint8_t* to, Ints x) {
  typedef uint8_t BytePiece __attribute__((vector_size(kRegisterLanes)));
  EACH_PIECE {
    const BytePiece bytes = __builtin_convertvector(x.piece[i], BytePiece);
    __builtin_memcpy(to + i * kRegisterLanes, &bytes, sizeof bytes);
  }
}

INLINED Ints lane_numbers() {
  int32_t numbers[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  FOR_PIECES(Ints, *reinterpret_cast<const IntsInMemory*>(numbers + i * kRegisterLanes));
}

INLINED Quarter larger(Quarter a, Quarter b) { return a > b ? a : b; }

// Half of the lanes: lane i stands for the lanes i and i + 8.
#if defined(TARGET_AVX512) || defined(TARGET_AVX2)
typedef float Half __attribute__((vector_size(32)));
#else
struct Half {
  Quarter piece[2];
};
#endif

#if defined(TARGET_AVX512)

INLINED Half lower(Floats x) { return __builtin_shufflevector(x.piece[0], x.piece[0], 0, 1, 2, 3, 4, 5, 6, 7); }
INLINED Half upper(Floats x) { return __builtin_shufflevector(x.piece[0], x.piece[0], 8, 9, 10, 11, 12, 13, 14, 15); }
INLINED Floats beside(Half a, Half b) {
  return {{__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}};
}

#elif defined(TARGET_AVX2)

INLINED Half lower(Floats x) { return x.piece[0]; }
INLINED Half upper(Floats x) { return x.piece[1]; }
INLINED Floats beside(Half a, Half b) { return {{a, b}}; }

#else

INLINED Half lower(Floats x) { return {{x.piece[0], x.piece[1]}}; }
INLINED Half upper(Floats x) { return {{x.piece[2], x.piece[3]}}; }
INLINED Floats beside(Half a, Half b) { return {{a.piece[0], a.piece[1], b.piece[0], b.piece[1]}}; }
INLINED Half operator+(Half a, Half b) { return {{a.piece[0] + b.piece[0], a.piece[1] + b.piece[1]}}; }
INLINED Half larger(Half a, Half b) { return {{larger(a.piece[0], b.piece[0]), larger(a.piece[1], b.piece[1])}}; }
INLINED Quarter lower(Half x) { return x.piece[0]; }
INLINED Quarter upper(Half x) { return x.piece[1]; }

#endif

#if defined(TARGET_AVX512) || defined(TARGET_AVX2)
INLINED Quarter lower(Half x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINED Quarter upper(Half x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }
INLINED Half larger(Half a, Half b) { return a > b ? a : b; }
#endif

INLINED float sum(Floats x) {
  const Half half = lower(x) + upper(x);
  Quarter quarter = lower(half) + upper(half);
  quarter += __builtin_shufflevector(quarter, quarter, 2, 3, 0, 1);
  return quarter[0] + quarter[1];
}

constexpr int kTogether = 8;

// The `sum` of each of several vectors, with the same bits and a third of the steps.
INLINED Half sums_of(const Floats (&x)[kTogether]) {
#if defined(TARGET_AVX512) || defined(TARGET_AVX2)
  Half quarters[kTogether / 2];  // of x[i], beside that of x[i + 4]
  for (int i = 0; i < kTogether / 2; ++i) {
    const Half a = lower(x[i]) + upper(x[i]), b = lower(x[i + 4]) + upper(x[i + 4]);
    quarters[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  Half pairs[2];
  for (int i = 0; i < 2; ++i) {
    const Half a = quarters[2 * i], b = quarters[2 * i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 9, 11, 5, 7, 13, 15);
#else
  Quarter pairs[kTogether / 2];
  for (int i = 0; i < kTogether / 2; ++i) {
    const Half halves[2] = {lower(x[2 * i]) + upper(x[2 * i]), lower(x[2 * i + 1]) + upper(x[2 * i + 1])};
    const Quarter a = lower(halves[0]) + upper(halves[0]), b = lower(halves[1]) + upper(halves[1]);
    pairs[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  }
  Half sums;
  for (int i = 0; i < 2; ++i) {
    const Quarter a = pairs[2 * i], b = pairs[2 * i + 1];
    sums.piece[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
  }
  return sums;
#endif
}

INLINED float largest(Floats x) {
  const Half half = larger(lower(x), upper(x));
  Quarter quarter = larger(lower(half), upper(half));
  quarter = larger(quarter, __builtin_shufflevector(quarter, quarter, 2, 3, 0, 1));
  return quarter[0] > quarter[1] ? quarter[0] : quarter[1];
}

INLINED bool any(Ints truth) {
  IntPiece both = truth.piece[0];
  for (int i = 1; i < kPieces; ++i) both |= truth.piece[i];
#if defined(TARGET_AVX512)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(both), reinterpret_cast<__m512i>(both)) != 0;
#elif defined(TARGET_AVX2)
  return !_mm256_testz_si256(reinterpret_cast<__m256i>(both), reinterpret_cast<__m256i>(both));
#elif defined(TARGET_NEON)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(both)) != 0;
#else
  return _mm_movemask_epi8(reinterpret_cast<__m128i>(both)) != 0;  // the lanes are -1 or 0
#endif
}

// `number` rounded to an integer (half to even), for magnitudes below 2^22: the sum with this constant drops the fraction.
INLINED Floats rounded(Floats number) { return (number + 12582912.0f) - 12582912.0f; }

// e^x for x <= 0, within 2e-7 (e^-87 for x < -87). It uses x = n log 2 + r, |r| <= log(2) / 2, and the polynomial of Cephes' expf.
INLINED Floats exp_of_negative(Floats x) {
  x = select(x < -87.0f, all(-87.0f), x);  // below, the power of two would not be a normal number; NaN stays NaN
  const Floats n = rounded(x * 1.44269504f);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two parts, the first exact
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * powers_of_two(to_ints(n));
}

#undef EACH_PIECE
#undef FOR_PIECES

}  // namespace tfexport::TARGET
