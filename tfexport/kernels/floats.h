// Vectors of sixteen floats. GCC and Clang map them to the CPU's registers. Results have the same bits on all CPUs: sums have one
// order, and the compiler does not fuse multiplications and additions, which not all CPUs can do (-ffp-contract=off). In 8 bits the
// last bit of an activation decides how it is rounded, and so which tokens are found. Exceptions are the float32 products, which
// fuse and only run on CPUs that can, and the log-probabilities of `BestTokens`, which call the system's exp and log.

namespace tfexport::TARGET {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
// Types of memory, which has any alignment. Clang takes variables of these types for aligned ones.
typedef float FloatsInMemory __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

INLINED Floats load(const float* from) { return *reinterpret_cast<const FloatsInMemory*>(from); }
INLINED void store(float* to, Floats numbers) { *reinterpret_cast<FloatsInMemory*>(to) = numbers; }
INLINED Floats all(float number) { return Floats{} + number; }
INLINED Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINED Floats magnitude(Floats a) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7fffffff); }

INLINED float sum(Floats x) {
  const Half half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  Quarter quarter = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  quarter += __builtin_shufflevector(quarter, quarter, 2, 3, 0, 1);
  return quarter[0] + quarter[1];
}

INLINED Floats beside(Half a, Half b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

constexpr Ints kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int kTogether = 8;

// The `sum` of each of several vectors, with the same bits and a third of the steps.
INLINED Half sums_of(const Floats (&x)[kTogether]) {
  Floats halves[kTogether / 2], quarters[kTogether / 4];
  for (int i = 0; i < kTogether / 2; ++i) {
    const Floats a = x[2 * i], b = x[2 * i + 1];
    halves[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < kTogether / 4; ++i) {
    const Floats a = halves[2 * i], b = halves[2 * i + 1];
    quarters[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  const Floats a = quarters[0], b = quarters[1];
  const Floats pairs = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                       __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7, 9, 11, 13, 15);
}

INLINED float largest(Floats x) {
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return x[0] > x[1] ? x[0] : x[1];
}

INLINED bool any(Ints truth) {
  const Longs lanes = reinterpret_cast<Longs>(truth);
  const auto half = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) | __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
  const auto quarter = __builtin_shufflevector(half, half, 0, 1) | __builtin_shufflevector(half, half, 2, 3);
  return (quarter[0] | quarter[1]) != 0;
}

// `number` rounded to an integer (half to even), for magnitudes below 2^22: the sum with this constant drops the fraction.
INLINED Floats rounded(Floats number) { return (number + 12582912.0f) - 12582912.0f; }

// e^x for x <= 0, within 2e-7 (e^-87 for x < -87). It uses x = n log 2 + r, |r| <= log(2) / 2, and the polynomial of Cephes' expf.
INLINED Floats exp_of_negative(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;  // below, the power of two would not be a normal number; NaN stays NaN
  const Floats n = rounded(x * 1.44269504f);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two parts, the first exact
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * reinterpret_cast<Floats>((__builtin_convertvector(n, Ints) + 127) << 23);
}

}  // namespace tfexport::TARGET
