// Products of rows with the 8-bit weights of a projection, by the instruction that CPUs have for them (VNNI): where there is
// none these operators are not registered, and their definitions run.
//
// Weights lie as the instruction takes them, int8 [blocks, groups, 16, 4]: 64 bytes are four inputs of sixteen outputs, and
// what is left of the last group and block is 0. They are read where the file is mapped: nothing is packed at loading.
//
// A product of a row and few columns ends before memory has delivered the next weights, so what counts for one row is to read
// them once, in their order. For many rows a tile of 8 rows and 48 columns stays in registers: all that is loaded in it is
// used 8 or 3 times.
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

#define WITH_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

namespace tfexport {

inline bool multiplies_int8() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }

constexpr int64_t kBlock = 16;      // outputs whose weights lie side by side
constexpr int64_t kGroup = 4;       // inputs
constexpr int64_t kTile = 3;        // blocks in registers
constexpr int64_t kWorth = 200000;  // multiplications that are worth waking up a thread for

// Rows in 8 bits: signed, or with `kRectified` unsigned.
struct RoundedRows {
  std::vector<uint8_t> numbers;  // [count, groups * kGroup]
  std::vector<int32_t> start;    // what their sums of products begin with
  std::vector<float> scale;
  int64_t count, stride;

  RoundedRows(int64_t rows, int64_t groups)
      : numbers(rows * groups * kGroup), start(rows), scale(rows), count(rows), stride(groups * kGroup) {}
};

struct Projection {
  const int8_t* weights;  // [blocks, groups, 16, 4]
  const float* scale;     // [columns]
  const float* bias;      // [columns]
  int64_t groups, columns;

  int64_t blocks() const { return (columns + kBlock - 1) / kBlock; }
};

// `kRows` rows times `kBlocks` blocks, whole blocks but for the last of the projection. The instruction multiplies unsigned
// numbers by signed ones. Where rows are signed, weights are made unsigned by adding 128 (the flip of a bit), and each sum
// starts at -128 times the sum of its row.
template <bool kRectified, int kRows, int kBlocks>
WITH_VNNI INLINED void multiply_tile(const RoundedRows& rows, int64_t row, const Projection& by, int64_t block, float* result) {
  __m512i sums[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = _mm512_set1_epi32(rows.start[row + r]);
  }
  const uint8_t* numbers = rows.numbers.data() + row * rows.stride;
  const int64_t block_size = by.groups * kBlock * kGroup;
  const int8_t* weights = by.weights + block * block_size;
  const __m512i flip = _mm512_set1_epi8(-128);
  for (int64_t group = 0; group < by.groups; ++group) {
    __m512i taken[kBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) {
      taken[b] = _mm512_loadu_si512(weights + b * block_size + group * kBlock * kGroup);
      if (!kRectified) taken[b] = _mm512_xor_si512(taken[b], flip);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      // Written out, because GCC loads all rows before it multiplies any, which takes more registers than there are: half
      // the speed.
      __m512i four;
      asm volatile("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t*>(numbers + r * rows.stride + group * kGroup)));
#pragma GCC unroll 8
      for (int b = 0; b < kBlocks; ++b) {
        if (kRectified) {
          asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][b]) : "v"(four), "v"(taken[b]));
        } else {
          asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][b]) : "v"(taken[b]), "v"(four));
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) {
    const int64_t column = (block + b) * kBlock, left = by.columns - column;
    const __mmask16 there = left >= kBlock ? 0xffff : (1u << left) - 1;
    const __m512 scale = _mm512_maskz_loadu_ps(there, by.scale + column), bias = _mm512_maskz_loadu_ps(there, by.bias + column);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][b]), scale);
      _mm512_mask_storeu_ps(result + (row + r) * by.columns + column, there, product * rows.scale[row + r] + bias);
    }
  }
}

template <bool kRectified, int kBlocks>
WITH_VNNI void multiply_blocks(const RoundedRows& rows, const Projection& by, int64_t block, float* result) {
  int64_t row = 0;
  for (; row + 8 <= rows.count; row += 8) multiply_tile<kRectified, 8, kBlocks>(rows, row, by, block, result);
  if (rows.count - row >= 4) multiply_tile<kRectified, 4, kBlocks>(rows, row, by, block, result), row += 4;
  if (rows.count - row >= 2) multiply_tile<kRectified, 2, kBlocks>(rows, row, by, block, result), row += 2;
  if (rows.count - row >= 1) multiply_tile<kRectified, 1, kBlocks>(rows, row, by, block, result);
}

// All `rows` times all columns to `result` [rows, columns], by as many threads as the session has.
template <bool kRectified>
void multiply(Context& context, const RoundedRows& rows, const Projection& by, float* result) {
  const int64_t tiles = (by.blocks() + kTile - 1) / kTile;
  const int64_t tasks = std::clamp<int64_t>(rows.count * rows.stride * by.columns / kWorth, 1, tiles);
  context.parallel(tasks, [&](int64_t task) {
    for (int64_t tile = tiles * task / tasks; tile < tiles * (task + 1) / tasks; ++tile) {
      const int64_t block = tile * kTile;
      switch (std::min(kTile, by.blocks() - block)) {
        case 1: multiply_blocks<kRectified, 1>(rows, by, block, result); break;
        case 2: multiply_blocks<kRectified, 2>(rows, by, block, result); break;
        default: multiply_blocks<kRectified, 3>(rows, by, block, result);
      }
    }
  });
}

// The projection of these inputs, to rows of `size` numbers; the operator fails where they do not belong together.
inline Projection projection_of(Context& context, const Tensor& weights, const Tensor& scale, const Tensor& bias, int64_t size) {
  const int64_t columns = scale.size, blocks = (columns + kBlock - 1) / kBlock;
  context.require(weights.dims.size() == 4 && weights.dims[0] == blocks && weights.dims[2] == kBlock && weights.dims[3] == kGroup &&
                      size == weights.dims[1] * kGroup && bias.size == columns,
                  "a product takes rows, weights for as many numbers, and a scale and a bias for each column");
  return {weights.as<int8_t>(), scale.as<float>(), bias.as<float>(), size / kGroup, columns};
}

// Args: states float [.., in], of which a ReLU is taken first with `kRectified`; weights int8; their scales and the bias,
// [out]. Gives float [.., out].
template <bool kRectified>
void int8_linear(Context& context) {
  const Tensor states = context.input(0), weights = context.input(1), scale = context.input(2), bias = context.input(3);
  const int64_t size = states.last();
  if (!context.require(!states.dims.empty() && size > 0, "a product takes rows")) return;
  const Projection by = projection_of(context, weights, scale, bias, size);
  std::vector<int64_t> dims = states.dims;
  dims.back() = by.columns;
  if (context.status()) return;
  auto* result = static_cast<float*>(context.output(0, dims));
  if (context.status()) return;
  RoundedRows rows(states.size / size, by.groups);
  const int64_t tasks = std::clamp<int64_t>(states.size / (kWorth / 8), 1, rows.count);
  context.parallel(tasks, [&](int64_t task) {
    for (int64_t row = rows.count * task / tasks; row < rows.count * (task + 1) / tasks; ++row) {
      int32_t sum = 0;
      rows.scale[row] = quantize<kRectified>(states.as<float>() + row * size, size, &rows.numbers[row * rows.stride], sum);
      rows.start[row] = kRectified ? 0 : -128 * sum;
    }
  });
  multiply<kRectified>(context, rows, by, result);
}

// Args: numbers uint8 [rows, d_model], 64 for 0, as ScreenStates gives them; weights int8; their scales, and what is added,
// [vocab]. Gives float [rows, vocab], in multiples of the rows' scales.
inline void screen_product(Context& context) {
  const Tensor numbers = context.input(0), weights = context.input(1), scale = context.input(2), room = context.input(3);
  const int64_t size = numbers.last();
  if (!context.require(numbers.dims.size() == 2 && size > 0, "a product takes rows")) return;
  const Projection by = projection_of(context, weights, scale, room, size);
  if (context.status()) return;
  RoundedRows rows(numbers.dims[0], by.groups);
  auto* result = static_cast<float*>(context.output(0, {rows.count, by.columns}));
  if (context.status()) return;
  for (int64_t row = 0; row < rows.count; ++row) {
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int8_t number = static_cast<int8_t>(numbers.as<uint8_t>()[row * size + i] - kZeroOfStates);
      rows.numbers[row * rows.stride + i] = static_cast<uint8_t>(number);
      sum += number;
    }
    rows.start[row] = -128 * sum;
    rows.scale[row] = 1;
  }
  multiply<false>(context, rows, by, result);
}

}  // namespace tfexport

#else

namespace tfexport {

inline bool multiplies_int8() { return false; }

}  // namespace tfexport

#endif
