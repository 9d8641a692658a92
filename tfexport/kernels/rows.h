// What is done to the rows of a matrix one by one: norms, rounding to 8 bits, and finding the best tokens. Each is one pass or
// two over a row that is in the cache of the CPU, where ONNX Runtime's operators take two to five nodes.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "floats.h"
#include "runtime.h"

namespace tfexport {

// Calls `each(i)` for the starts of groups of lanes, and `rest(i)` for what is left of `size`.
template <typename Each, typename Rest>
INLINED void by_lanes(int64_t size, Each each, Rest rest) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) each(i);
  for (; i < size; ++i) rest(i);
}

// `total` is the sum of two rows, `normed` its LayerNorm (Ba et al. 2016), of which the sums are in float32.
FOR_EACH_CPU void add_and_norm(const float* a, const float* b, const float* scale, const float* bias, float epsilon,
                               int64_t size, float* total, float* normed) {
  Floats sums = {}, squares = {};
  float last_sum = 0, last_squares = 0;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Floats both = load(a + i) + load(b + i);
        store(total + i, both);
        sums += both;
      },
      [&](int64_t i) INLINED_LAMBDA { last_sum += total[i] = a[i] + b[i]; });
  const float mean = (sum(sums) + last_sum) / size;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Floats off = load(total + i) - mean;
        squares += off * off;
      },
      [&](int64_t i) INLINED_LAMBDA { last_squares += (total[i] - mean) * (total[i] - mean); });
  const float factor = 1.0f / std::sqrt((sum(squares) + last_squares) / size + epsilon);
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        store(normed + i, (load(total + i) - mean) * factor * load(scale + i) + load(bias + i));
      },
      [&](int64_t i) INLINED_LAMBDA { normed[i] = (total[i] - mean) * factor * scale[i] + bias[i]; });
}

// Args: two tensors float [.., size]; scale and bias [size]; epsilon, an attribute. Gives their sum, and its LayerNorm.
inline void residual_norm(Context& context) {
  const Tensor a = context.input(0), b = context.input(1), scale = context.input(2), bias = context.input(3);
  const int64_t size = a.last();
  context.require(a.dims == b.dims && size > 0 && scale.size == size && bias.size == size,
                  "ResidualNorm takes two tensors of one shape, and a scale and a bias for each of the last axis");
  if (context.status()) return;
  auto* total = static_cast<float*>(context.output(0, a.dims));
  auto* normed = static_cast<float*>(context.output(1, a.dims));
  if (context.status()) return;
  for (int64_t row = 0; row < a.size; row += size) {
    add_and_norm(a.as<float>() + row, b.as<float>() + row, scale.as<float>(), bias.as<float>(), context.attribute, size,
                 total + row, normed + row);
  }
}

// Numbers to whole multiples of a scale, of which the largest magnitude is 127 (int8), or with `kRectified` 255 (uint8, what is
// below 0 taken for 0). `sum` is that of what they are rounded to. Returns the scale.
template <bool kRectified>
FOR_EACH_CPU float quantize(const float* numbers, int64_t size, uint8_t* rounded_to, int32_t& sum) {
  constexpr float kFloor = kRectified ? 0.0f : -FLT_MAX, kMost = kRectified ? 255 : 127;
  Floats magnitudes = {}, zeros = {};
  float last = 0, last_zero = 0;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        magnitudes = larger(magnitudes, magnitude(larger(load(numbers + i), all(kFloor))));
        zeros += load(numbers + i) * 0.0f;  // NaN where a number is not finite, which a comparison may not see
      },
      [&](int64_t i) INLINED_LAMBDA {
        last = std::max(last, std::fabs(std::max(numbers[i], kFloor)));
        last_zero += numbers[i] * 0.0f;
      });
  const float scale = std::max(largest(magnitudes), last) * (1.0f / kMost) + (tfexport::sum(zeros) + last_zero);
  sum = 0;
  if (!(scale <= FLT_MAX)) {  // what is no number, the scale tells
    std::memset(rounded_to, 0, size);
    return scale;
  }
  // Of a row of zeros the scale is 0, and of the least floats it has few bits: both are rounded to 0.
  const float divisor = scale >= FLT_MIN ? scale : 1.0f;
  Ints sums = {};
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Ints whole = __builtin_convertvector(rounded(larger(load(numbers + i), all(kFloor)) / divisor), Ints);
        sums += whole;
        *reinterpret_cast<Bytes*>(rounded_to + i) = __builtin_convertvector(whole, Bytes);
      },
      [&](int64_t i) INLINED_LAMBDA {
        const auto whole = static_cast<int32_t>(std::nearbyint(std::max(numbers[i], kFloor) / divisor));
        sum += whole;
        rounded_to[i] = static_cast<uint8_t>(whole);
      });
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return scale;
}

FOR_EACH_CPU void scale_and_add(const float* numbers, float scale, const float* bias, int64_t size, float* result) {
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { store(result + i, load(numbers + i) * scale + load(bias + i)); },
      [&](int64_t i) INLINED_LAMBDA { result[i] = numbers[i] * scale + bias[i]; });
}

// The largest of a row, and the log of the sum of e^(x - largest).
FOR_EACH_CPU void log_sum_exp(const float* row, int64_t size, float& most, float& log_sum) {
  Floats mosts = all(-INFINITY);
  float last = -INFINITY;
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { mosts = larger(mosts, load(row + i)); },
      [&](int64_t i) INLINED_LAMBDA { last = std::max(last, row[i]); });
  most = std::max(largest(mosts), last);
  Floats sums = {};
  float last_sum = 0;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Floats off = load(row + i) - most;
        sums += off < -87.0f ? Floats{} : exp_of_negative(off);
      },
      [&](int64_t i) INLINED_LAMBDA { last_sum += std::exp(row[i] - most); });
  log_sum = std::log(sum(sums) + last_sum);
}

struct Found {
  float log_prob;
  int64_t id;
};

// Puts the best `count` of a row into `found`, best first; of equal ones the first in the row.
FOR_EACH_CPU void best_of(const float* row, int64_t size, float most, float log_sum, int64_t count, Found* found) {
  int64_t have = 0;
  float least = -INFINITY;  // to be better than, once there are so many
  const auto take = [&](int64_t id) INLINED_LAMBDA {
    const float log_prob = (row[id] - most) - log_sum;
    if (have == count && !(log_prob > least)) return;
    int64_t place = have < count ? have++ : count - 1;
    for (; place > 0 && log_prob > found[place - 1].log_prob; --place) found[place] = found[place - 1];
    found[place] = {log_prob, id};
    if (have == count) least = found[count - 1].log_prob;
  };
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        if (have == count && !any(((load(row + i) - most) - log_sum) > least)) return;
        for (int lane = 0; lane < kLanes; ++lane) take(i + lane);
      },
      [&](int64_t i) INLINED_LAMBDA { take(i); });
}

// Args: logits float [rows, vocab]; count int64 [1]. Gives log-probabilities and ids of the best tokens, [rows, count].
inline void best_tokens(Context& context) {
  const Tensor logits = context.input(0), counts = context.input(1);
  if (!context.require(logits.dims.size() == 2 && counts.size == 1, "BestTokens takes rows, and how many to find")) return;
  const int64_t rows = logits.dims[0], vocab = logits.dims[1], count = *counts.as<int64_t>();
  if (!context.require(count >= 0 && count <= vocab, "there are not so many tokens")) return;
  auto* log_probs = static_cast<float*>(context.output(0, {rows, count}));
  auto* ids = static_cast<int64_t*>(context.output(1, {rows, count}));
  if (context.status() || rows == 0 || count == 0) return;
  std::vector<Found> found(count);
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits.as<float>() + row * vocab;
    float most, log_sum;
    log_sum_exp(own, vocab, most, log_sum);
    best_of(own, vocab, most, log_sum, count, found.data());
    for (int64_t i = 0; i < count; ++i) {
      log_probs[row * count + i] = found[i].log_prob;
      ids[row * count + i] = found[i].id;
    }
  }
}

FOR_EACH_CPU bool has_nan(const float* row, int64_t size) {
  Ints found = {};
  bool last = false;
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { found |= load(row + i) != load(row + i); },
      [&](int64_t i) INLINED_LAMBDA { last |= row[i] != row[i]; });
  return last || any(found);
}

// Args: logits float [rows, vocab]; the ids int64 [banned] that may not come. Gives the largest logit of what may, and its id,
// [rows, 1]; of equal ones the first. Where all are banned, that is -inf; where one is NaN, NaN.
inline void best_token(Context& context) {
  const Tensor logits = context.input(0), banned = context.input(1);
  if (!context.require(logits.dims.size() == 2 && logits.dims[1] > 0, "BestToken takes rows of logits")) return;
  const int64_t rows = logits.dims[0], vocab = logits.dims[1];
  std::vector<bool> may_come(vocab, true);
  for (int64_t i = 0; i < banned.size; ++i) {
    const int64_t id = banned.as<int64_t>()[i];
    if (!context.require(id >= 0 && id < vocab, "there is no such token to ban")) return;
    may_come[id] = false;
  }
  auto* largest = static_cast<float*>(context.output(0, {rows, 1}));
  auto* ids = static_cast<int64_t*>(context.output(1, {rows, 1}));
  if (context.status()) return;
  // One more than are banned are looked at, so that one of them may come.
  const int64_t count = std::min(vocab, banned.size + 1);
  std::vector<Found> found(count);
  for (int64_t row = 0; row < rows; ++row) {
    best_of(logits.as<float>() + row * vocab, vocab, 0, 0, count, found.data());
    const auto first = std::find_if(found.begin(), found.end(), [&](const Found& one) { return may_come[one.id]; });
    largest[row] = first == found.end() ? -INFINITY : first->log_prob;
    ids[row] = largest[row] == -INFINITY ? 0 : first->id;  // then all are equal, and the first of all is the best
    if (has_nan(logits.as<float>() + row * vocab, vocab)) largest[row] = NAN;
  }
}

}  // namespace tfexport
