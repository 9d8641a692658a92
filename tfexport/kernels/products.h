// Products of rows with the weights of a projection, in float32 and in 8 bits, for CPUs with AVX-512 and VNNI. On other CPUs
// these operators are not registered, and their definitions run.
//
// Weights are stored in blocks of 48 outputs: float32 [blocks, in, 48], and int8 [blocks, in / 4, 48, 4], with four adjacent
// inputs for the instruction. The rest of the last block is 0. The file has 8-bit weights in this order, and they are read from
// its mapping. ONNX Runtime brings float32 weights into this order when it loads a graph.
//
// With one row, the memory limits the speed: weights are read once, from first to last, except those of inputs that a ReLU
// makes 0. With many rows, a tile of 8 rows and a block stays in registers, so that each loaded value is used 3 or 8 times.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "floats.h"
#include "rows.h"
#include "runtime.h"
#include "screening.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

// A loop over the registers of a tile.
#define UNROLLED _Pragma("GCC unroll 8")

namespace tfexport {

inline bool has_products() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

constexpr int64_t kWidest = 3;                // registers of outputs in a tile
constexpr int64_t kBlock = kWidest * kLanes;  // outputs with adjacent weights
constexpr int64_t kGroup = 4;                 // inputs with adjacent weights, in 8 bits
constexpr int64_t kAhead = 8192;              // bytes to fetch in advance: the CPU's own prefetching stops at each page
constexpr int64_t kListAhead = 32;            // listed inputs to fetch in advance
constexpr int64_t kSummed = 256;              // inputs whose float32 products are one sum, as in ONNX Runtime's Gemm
constexpr int64_t kFewRows = 8;               // most rows that are searched for inputs that a ReLU makes 0 in all of them
constexpr double kWorthListing = 0.8;         // largest share of inputs to list; above it, using all inputs takes no longer
constexpr int64_t kMostInputs = 65536;  // most inputs for which sums of 8-bit products always fit into 32 bits

// Assumed speed of a CPU in multiplications and bytes of weights per second, to decide when waking up a thread is worthwhile.
constexpr double kMultiplications = 1e11, kInt8Multiplications = 4e11, kBytes = 8e10;

// A mask of the 16 outputs from `column` on that exist.
WITH_AVX512 INLINED __mmask16 outputs_from(int64_t column, int64_t columns) {
  return columns - column >= kLanes ? 0xffff : (1u << (columns - column)) - 1;
}

// Float32 product, after a ReLU of the rows with `kRectified`. Each result is summed in the order of its inputs; `kListed` only
// uses the listed inputs. Every `kSummed` inputs, listed or not, have their own sum, because the error of a sum grows with its
// length. ONNX Runtime's Gemm does the same, so the results are bit-identical on a CPU that fuses multiply and add.
template <bool kRectified, bool kListed>
struct FloatProduct {
  const float* rows;     // [count, stride]
  const float* weights;  // [blocks, stride, 48]
  const float* bias;     // [columns]
  int64_t count, stride, columns;
  const int32_t* listed;  // [used + kListAhead]; the entries after `used` are only fetched
  int64_t used;           // number of listed inputs

  double seconds() const {
    const double size = static_cast<double>(used) * columns;
    return std::max(size * count / kMultiplications, size * sizeof(float) / kBytes);
  }

  // A tile of rows and registers of outputs, from `column` on, where a block begins. It is a separate function, because GCC
  // spills registers of the innermost loop to the stack if it sees the loops of other tiles next to it.
  template <int kRows, int kWidth>
  WITH_AVX512 __attribute__((noinline)) void tile(int64_t row, int64_t column, float* result) const {
    for (int64_t input = 0, start = 0, end; input < stride; input += kSummed, start = end) {
      end = kListed ? std::lower_bound(listed + start, listed + used, input + kSummed) - listed : std::min(input + kSummed, used);
      add_inputs<kRows, kWidth>(row, column, start, end, input ? nullptr : bias, result);
    }
  }

  // Adds the inputs from `start` to `end` to `added` in each row, or without it to `result`, because no registers are left for
  // the earlier sums.
  template <int kRows, int kWidth>
  WITH_AVX512 INLINED void add_inputs(int64_t row, int64_t column, int64_t start, int64_t end, const float* added,
                                      float* result) const {
    __m512 sums[kRows][kWidth];
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int w = 0; w < kWidth; ++w) sums[r][w] = _mm512_setzero_ps();
    }
    const float* numbers = rows + row * stride;
    const float* block = weights + column * stride;
    for (int64_t place = start; place < end; ++place) {
      const int64_t i = kListed ? listed[place] : place;
      __m512 taken[kWidth];
      UNROLLED for (int w = 0; w < kWidth; ++w) {
        const float* from = block + i * kBlock + w * kLanes;
        const float* ahead = kListed ? block + listed[place + kListAhead] * kBlock + w * kLanes : from + kAhead / sizeof(float);
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
        taken[w] = _mm512_loadu_ps(from);
      }
      UNROLLED for (int r = 0; r < kRows; ++r) {
        // In assembly, because GCC loads all rows before the first multiplication, which needs too many registers and halves
        // the speed.
        __m512 number;
        asm volatile("vbroadcastss %1, %0" : "=v"(number) : "m"(numbers[r * stride + i]));
        if (kRectified) number = _mm512_max_ps(_mm512_setzero_ps(), number);  // this order keeps NaN
        UNROLLED for (int w = 0; w < kWidth; ++w) {
          sums[r][w] = _mm512_fmadd_ps(number, taken[w], sums[r][w]);
        }
      }
    }
    UNROLLED for (int w = 0; w < kWidth; ++w) {
      const int64_t first = column + w * kLanes;
      const __mmask16 there = outputs_from(first, columns);
      UNROLLED for (int r = 0; r < kRows; ++r) {
        float* to = result + (row + r) * columns + first;
        const __m512 before = _mm512_maskz_loadu_ps(there, added ? added + first : to);
        _mm512_mask_storeu_ps(to, there, _mm512_add_ps(before, sums[r][w]));
      }
    }
  }
};

// Rows in 8 bits, each with a scale: signed, or unsigned after a ReLU.
struct RoundedRows {
  std::vector<uint8_t> numbers;  // [count, stride]
  std::vector<int32_t> start;    // initial value of the sums of each row
  std::vector<float> scale;

  RoundedRows(int64_t count, int64_t stride) : numbers(count * stride), start(count), scale(count) {}
};

// The instruction multiplies unsigned numbers by signed ones. If the rows are signed, weights become unsigned by adding 128
// (flipping a bit), and each sum starts at -128 times the sum of its row.
template <bool kRectified>
struct Int8Product {
  const RoundedRows& rows;
  const int8_t* weights;  // [blocks, stride / 4, 48, 4]
  const float* scale;     // [columns]
  const float* bias;      // [columns]
  int64_t count, stride, columns;

  double seconds() const {
    const double size = static_cast<double>(stride) * columns;
    return std::max(size * count / kInt8Multiplications, size / kBytes);
  }

  template <int kRows, int kWidth>
  WITH_AVX512 INLINED void tile(int64_t row, int64_t column, float* result) const {
    __m512i sums[kRows][kWidth];
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int w = 0; w < kWidth; ++w) sums[r][w] = _mm512_set1_epi32(rows.start[row + r]);
    }
    const uint8_t* numbers = rows.numbers.data() + row * stride;
    const int8_t* block = weights + column * stride;
    const __m512i flip = _mm512_set1_epi8(-128);
    for (int64_t i = 0; i < stride; i += kGroup) {
      __m512i taken[kWidth];
      UNROLLED for (int w = 0; w < kWidth; ++w) {
        const int8_t* from = block + i * kBlock + w * kLanes * kGroup;
        _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
        taken[w] = _mm512_loadu_si512(from);
        if (!kRectified) taken[w] = _mm512_xor_si512(taken[w], flip);
      }
      UNROLLED for (int r = 0; r < kRows; ++r) {
        __m512i four;
        const auto* from = reinterpret_cast<const int32_t*>(numbers + r * stride + i);
        asm volatile("vpbroadcastd %1, %0" : "=v"(four) : "m"(*from));
        UNROLLED for (int w = 0; w < kWidth; ++w) {
          if (kRectified) {
            asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][w]) : "v"(four), "v"(taken[w]));
          } else {
            asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][w]) : "v"(taken[w]), "v"(four));
          }
        }
      }
    }
    UNROLLED for (int w = 0; w < kWidth; ++w) {
      const int64_t first = column + w * kLanes;
      const __mmask16 there = outputs_from(first, columns);
      const __m512 factor = _mm512_maskz_loadu_ps(there, scale + first), more = _mm512_maskz_loadu_ps(there, bias + first);
      UNROLLED for (int r = 0; r < kRows; ++r) {
        const __m512 product = _mm512_cvtepi32_ps(sums[r][w]) * factor * rows.scale[row + r];
        _mm512_mask_storeu_ps(result + (row + r) * columns + first, there, product + more);
      }
    }
  }
};

// Multiplies all rows with the `kWidth` registers of outputs from `column` on.
template <int kWidth, typename Product>
WITH_AVX512 void multiply_block(const Product& product, int64_t column, float* result) {
  int64_t row = 0;
  for (; row + 8 <= product.count; row += 8) product.template tile<8, kWidth>(row, column, result);
  switch (product.count - row) {
    case 7: return product.template tile<7, kWidth>(row, column, result);
    case 6: return product.template tile<6, kWidth>(row, column, result);
    case 5: return product.template tile<5, kWidth>(row, column, result);
    case 4: return product.template tile<4, kWidth>(row, column, result);
    case 3: return product.template tile<3, kWidth>(row, column, result);
    case 2: return product.template tile<2, kWidth>(row, column, result);
    case 1: return product.template tile<1, kWidth>(row, column, result);
  }
}

// Multiplies all rows with all columns into `result` [count, columns], with the threads of the session.
template <typename Product>
void multiply(Context& context, const Product& product, float* result) {
  const int64_t blocks = (product.columns + kBlock - 1) / kBlock;
  const int64_t tasks = std::clamp<int64_t>(product.seconds() / kTask, 1, blocks);
  context.parallel(tasks, [&](int64_t task) {
    for (int64_t block = blocks * task / tasks; block < blocks * (task + 1) / tasks; ++block) {
      const int64_t column = block * kBlock, left = product.columns - column;
      if (left > 2 * kLanes) {
        multiply_block<3>(product, column, result);
      } else if (left > kLanes) {
        multiply_block<2>(product, column, result);
      } else {
        multiply_block<1>(product, column, result);
      }
    }
  });
}

// Memory for the result, with a row of `columns` for each row of `states`; null if the operator has failed.
inline float* result_of(Context& context, const Tensor& states, int64_t columns) {
  Dims dims = states.dims;
  if (context.status()) return nullptr;
  dims.back() = columns;
  auto* result = static_cast<float*>(context.output(0, dims));
  return context.status() ? nullptr : result;
}

constexpr char kMisfit[] =
    "a product takes rows (in 8 bits of 65536 numbers at most), weights for as many, and what is added for each column";

inline bool are_blocks(const Tensor& weights, int64_t columns, int64_t size) {
  return columns > 0 && weights.dims.size() == 3 && weights.dims[0] == (columns + kBlock - 1) / kBlock && weights.dims[1] == size &&
         weights.dims[2] == kBlock;
}

inline bool are_int8_blocks(const Tensor& weights, int64_t columns, int64_t size) {
  return columns > 0 && size <= kMostInputs && weights.dims.size() == 4 && weights.dims[0] == (columns + kBlock - 1) / kBlock &&
         weights.dims[1] * kGroup == size && weights.dims[2] == kBlock && weights.dims[3] == kGroup;
}

// Writes the inputs that are above 0 in at least one of `rows` into `list`, in order, followed by `kListAhead` valid inputs;
// returns the number of inputs above 0. In a trained network they are few, and the weights of the others are not read.
WITH_AVX512 inline int64_t list_positive(const float* rows, int64_t count, int64_t size, std::vector<int32_t>& list) {
  list.resize(size + kListAhead + kLanes);  // because whole registers are stored
  int64_t used = 0;
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 there = outputs_from(i, size);
    __mmask16 left = 0;
    for (int64_t row = 0; row < count; ++row) {
      // "Not less or equal" keeps NaN.
      left |= _mm512_mask_cmp_ps_mask(there, _mm512_maskz_loadu_ps(there, rows + row * size + i), _mm512_setzero_ps(), _CMP_NLE_UQ);
    }
    const __m512i inputs = _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
    _mm512_storeu_si512(list.data() + used, _mm512_maskz_compress_epi32(left, inputs));
    used += __builtin_popcount(left);
  }
  std::fill_n(list.begin() + used, kListAhead, 0);
  return used;
}

// Args: states float [.., in], after a ReLU with `kRectified`; weights float; bias [out]. Returns [.., out].
template <bool kRectified>
void linear(Context& context) {
  const Tensor states = context.input(0), weights = context.input(1), bias = context.input(2);
  const int64_t size = states.last();
  context.require(!states.dims.empty() && size > 0 && are_blocks(weights, bias.size, size), kMisfit);
  float* result = result_of(context, states, bias.size);
  if (!result) return;
  const int64_t count = states.size / size;
  const float *rows = states.as<float>(), *blocks = weights.as<float>(), *added = bias.as<float>();
  if (kRectified && count <= kFewRows && size < INT32_MAX) {
    static thread_local std::vector<int32_t> list;
    const int64_t used = list_positive(rows, count, size, list);
    if (used < size * kWorthListing) {
      return multiply(context, FloatProduct<true, true>{rows, blocks, added, count, size, bias.size, list.data(), used}, result);
    }
  }
  multiply(context, FloatProduct<kRectified, false>{rows, blocks, added, count, size, bias.size, nullptr, size}, result);
}

// Args: states float [.., in], after a ReLU with `kRectified`; weights int8; their scales, and the bias, [out]. Returns float
// [.., out].
template <bool kRectified>
void int8_linear(Context& context) {
  const Tensor states = context.input(0), weights = context.input(1), scale = context.input(2), bias = context.input(3);
  const int64_t size = states.last(), columns = bias.size;
  context.require(!states.dims.empty() && size > 0 && are_int8_blocks(weights, columns, size) && scale.size == columns, kMisfit);
  float* result = result_of(context, states, columns);
  if (!result) return;
  const int64_t count = states.size / size;
  RoundedRows rows(count, size);
  const double seconds = states.size * sizeof(float) * 2 / kBytes;
  const int64_t tasks = std::clamp<int64_t>(seconds / kTask, 1, std::max<int64_t>(count, 1));
  context.parallel(tasks, [&](int64_t task) {
    for (int64_t row = count * task / tasks; row < count * (task + 1) / tasks; ++row) {
      int32_t sum = 0;
      rows.scale[row] = quantize<kRectified>(states.as<float>() + row * size, size, &rows.numbers[row * size], sum);
      rows.start[row] = kRectified ? 0 : -128 * sum;
    }
  });
  if (context.status()) return;
  const Int8Product<kRectified> product = {rows, weights.as<int8_t>(), scale.as<float>(), bias.as<float>(), count, size, columns};
  multiply(context, product, result);
}

// Args: numbers uint8 [rows, d_model], 64 for 0, from ScreenStates; weights int8; their scales and addends, [vocab]. Returns
// float [rows, vocab], in multiples of the rows' scales.
inline void screen_product(Context& context) {
  const Tensor numbers = context.input(0), weights = context.input(1), scale = context.input(2), room = context.input(3);
  const int64_t size = numbers.last(), columns = room.size;
  context.require(numbers.dims.size() == 2 && size > 0 && are_int8_blocks(weights, columns, size) && scale.size == columns, kMisfit);
  float* result = result_of(context, numbers, columns);
  if (!result) return;
  const int64_t count = numbers.dims[0];
  RoundedRows rows(count, size);
  for (int64_t row = 0; row < count; ++row) {
    int32_t sum = 0;
    for (int64_t i = row * size; i < (row + 1) * size; ++i) {
      const int32_t number = numbers.as<uint8_t>()[i] - kZeroOfStates;
      rows.numbers[i] = static_cast<uint8_t>(number);
      sum += number;
    }
    rows.start[row] = -128 * sum;
    rows.scale[row] = 1;
  }
  const Int8Product<false> product = {rows, weights.as<int8_t>(), scale.as<float>(), room.as<float>(), count, size, columns};
  multiply(context, product, result);
}

}  // namespace tfexport

#else

namespace tfexport {

inline bool has_products() { return false; }

}  // namespace tfexport

#endif
