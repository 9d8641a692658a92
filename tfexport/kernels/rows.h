// Operations on single rows of a matrix: norms, rounding to 8 bits, and the search for the best tokens. Each makes one or two
// passes over a row in the CPU's cache. ONNX Runtime's operators need two to five nodes for it.
namespace tfexport::TARGET {

// Calls `each(i)` for the starts of groups of lanes, and `rest(i)` for the rest of `size`.
template <typename Each, typename Rest>
INLINED void by_lanes(int64_t size, Each each, Rest rest) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) each(i);
  for (; i < size; ++i) rest(i);
}

// `total` is the sum of two rows, `normed` is its LayerNorm (Ba et al. 2016), summed in float32.
static void add_and_norm(const float* a, const float* b, const float* scale, const float* bias, float epsilon,
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

// Args: two tensors float [.., size]; scale and bias [size]; epsilon, an attribute. Returns their sum and its LayerNorm.
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

// Rounds numbers to integer multiples of a scale. The largest magnitude is 127 (int8), or with `kRectified` 255 (uint8, with 0
// for negative numbers). `sum` is the sum of the rounded numbers. Returns the scale.
template <bool kRectified>
static float quantize(const float* numbers, int64_t size, uint8_t* rounded_to, int32_t& sum) {
  constexpr float kFloor = kRectified ? 0.0f : -FLT_MAX, kMost = kRectified ? 255 : 127;
  Floats magnitudes = {}, zeros = {};
  float last = 0, last_zero = 0;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        magnitudes = larger(magnitudes, magnitude(larger(load(numbers + i), all(kFloor))));
        zeros += load(numbers + i) * 0.0f;  // NaN if a number is not finite, which a comparison may miss
      },
      [&](int64_t i) INLINED_LAMBDA {
        last = std::max(last, std::fabs(std::max(numbers[i], kFloor)));
        last_zero += numbers[i] * 0.0f;
      });
  const float scale = std::max(largest(magnitudes), last) * (1.0f / kMost) + (TARGET::sum(zeros) + last_zero);
  sum = 0;
  if (!(scale <= FLT_MAX)) {  // the scale shows that a number is not finite
    std::memset(rounded_to, 0, size);
    return scale;
  }
  // For a row of zeros the scale is 0, and for the smallest floats it has few bits: both are rounded to 0.
  const float divisor = scale >= FLT_MIN ? scale : 1.0f;
  Ints sums = {};
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Ints whole = to_ints(rounded(larger(load(numbers + i), all(kFloor)) / divisor));
        sums += whole;
        store_bytes(rounded_to + i, whole);
      },
      [&](int64_t i) INLINED_LAMBDA {
        const auto whole = static_cast<int32_t>(std::nearbyint(std::max(numbers[i], kFloor) / divisor));
        sum += whole;
        rounded_to[i] = static_cast<uint8_t>(whole);
      });
  int32_t lanes[kLanes];
  store(lanes, sums);
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return scale;
}

static void scale_and_add(const float* numbers, float scale, const float* bias, int64_t size, float* result) {
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { store(result + i, load(numbers + i) * scale + load(bias + i)); },
      [&](int64_t i) INLINED_LAMBDA { result[i] = numbers[i] * scale + bias[i]; });
}

constexpr int64_t kChunk = 8 * kLanes;

inline int64_t chunks_of(int64_t size) { return (size + kChunk - 1) / kChunk; }

// The largest of each `kChunk` numbers of a row, [chunks]. NaN is skipped.
static void largest_of_chunks(const float* row, int64_t size, float* largests) {
  for (int64_t start = 0; start < size; start += kChunk) {
    Floats mosts = all(-INFINITY);
    float last = -INFINITY;
    const float* chunk = row + start;
    by_lanes(
        std::min(size - start, kChunk), [&](int64_t i) INLINED_LAMBDA { mosts = larger(load(chunk + i), mosts); },
        [&](int64_t i) INLINED_LAMBDA { last = std::max(last, chunk[i]); });
    largests[start / kChunk] = std::max(largest(mosts), last);
  }
}

// The log of the sum of e^(x - most).
static float log_sum_exp(const float* row, int64_t size, float most) {
  Floats sums = {};
  float last_sum = 0;
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { sums += exp_of_negative(load(row + i) - most); },
      [&](int64_t i) INLINED_LAMBDA { last_sum += std::exp(row[i] - most); });
  return std::log(sum(sums) + last_sum);
}

struct Found {
  float log_prob;
  int64_t id;
};

// The best of the given numbers, best first; of equal numbers the earlier one. It is for small rankings: the time grows with
// the square of their size. A NaN is kept if there is room, and no number is better than it. Callers must detect rows with NaN
// in another way.
class Ranking {
 public:
  explicit Ranking(int64_t count) : found(count) {}

  // Clears the ranking. From now on, numbers below `bar` are skipped.
  void begin(float bar) { have_ = 0, bar_ = bar; }

  // Adds the log-probabilities of a row's numbers from `start` to `end`.
  INLINED void see(const float* row, int64_t start, int64_t end, float most, float log_sum) {
    by_lanes(
        end - start,
        [&](int64_t i) INLINED_LAMBDA {
          if (!any(~(((load(row + start + i) - most) - log_sum) < bar_))) return;
          for (int lane = 0; lane < kLanes; ++lane) take((row[start + i + lane] - most) - log_sum, start + i + lane);
        },
        [&](int64_t i) INLINED_LAMBDA { take((row[start + i] - most) - log_sum, start + i); });
  }

  // The last number of a full ranking, or a smaller number if the ranking is not full.
  float bar() const { return bar_; }

  std::vector<Found> found;

 private:
  bool is_full() const { return have_ == static_cast<int64_t>(found.size()); }

  INLINED void take(float log_prob, int64_t id) {
    if (is_full() ? !(log_prob > bar_) : log_prob < bar_) return;
    int64_t place = is_full() ? have_ - 1 : have_++;
    for (; place > 0 && log_prob > found[place - 1].log_prob; --place) found[place] = found[place - 1];
    found[place] = {log_prob, id};
    if (is_full()) bar_ = found.back().log_prob;
  }

  int64_t have_ = 0;
  float bar_ = -INFINITY;
};

// Adds the best numbers of a row to `ranking`. The last of the best `largests`, which are the largest numbers of all chunks, is
// a lower bound for them, so only chunks with a number that is not below it are searched.
static void rank(const float* row, int64_t size, const std::vector<float>& largests, float most, float log_sum,
                       Ranking& ranking) {
  const int64_t chunks = static_cast<int64_t>(largests.size());
  ranking.begin(-INFINITY);
  ranking.see(largests.data(), 0, chunks, most, log_sum);
  const float bar = ranking.bar();
  ranking.begin(bar);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if ((largests[chunk] - most) - log_sum < bar) continue;
    ranking.see(row, chunk * kChunk, std::min(size, (chunk + 1) * kChunk), most, log_sum);
  }
}

constexpr int64_t kFewBest = 128;  // largest count for which a ranking is faster than sorting the row

// Writes the best numbers of a row into `found`, in the order of a ranking, for any count. If `log_sum` is NaN, all
// log-probabilities are NaN.
inline void rank_many(const float* row, int64_t size, float most, float log_sum, std::vector<Found>& every, std::vector<Found>& found) {
  every.resize(size);
  for (int64_t id = 0; id < size; ++id) every[id] = {(row[id] - most) - log_sum, id};
  const auto count = static_cast<int64_t>(found.size());
  if (log_sum == log_sum) {
    const auto is_better = [](const Found& a, const Found& b) {
      return a.log_prob > b.log_prob || (a.log_prob == b.log_prob && a.id < b.id);
    };
    std::nth_element(every.begin(), every.begin() + (count - 1), every.end(), is_better);
    std::sort(every.begin(), every.begin() + count, is_better);
  }
  std::copy_n(every.begin(), count, found.begin());
}

// Args: logits float [rows, vocab]; count int64 [1]. Returns log-probabilities and ids of the best tokens, [rows, count].
inline void best_tokens(Context& context) {
  const Tensor logits = context.input(0), counts = context.input(1);
  if (!context.require(logits.dims.size() == 2 && counts.size == 1, "BestTokens takes rows, and how many to find")) return;
  const int64_t rows = logits.dims[0], vocab = logits.dims[1], count = *counts.as<int64_t>();
  if (!context.require(count >= 0 && count <= vocab, "there are not so many tokens")) return;
  auto* log_probs = static_cast<float*>(context.output(0, {rows, count}));
  auto* ids = static_cast<int64_t*>(context.output(1, {rows, count}));
  if (context.status() || rows == 0 || count == 0) return;
  Ranking ranking(count);
  std::vector<float> largests(chunks_of(vocab));
  std::vector<Found> every;
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits.as<float>() + row * vocab;
    largest_of_chunks(own, vocab, largests.data());
    const float most = *std::max_element(largests.begin(), largests.end());
    const float log_sum = log_sum_exp(own, vocab, most);
    if (count > kFewBest) {
      rank_many(own, vocab, most, log_sum, every, ranking.found);
    } else {
      rank(own, vocab, largests, most, log_sum, ranking);
    }
    for (int64_t i = 0; i < count; ++i) {
      log_probs[row * count + i] = ranking.found[i].log_prob;
      ids[row * count + i] = ranking.found[i].id;
    }
  }
}

static bool has_nan(const float* row, int64_t size) {
  Ints found = {};
  bool last = false;
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { found |= load(row + i) != load(row + i); },
      [&](int64_t i) INLINED_LAMBDA { last |= row[i] != row[i]; });
  return last || any(found);
}

// The first of the largest numbers of a row.
static int64_t first_of_largest(const float* row, int64_t size, std::vector<float>& largests) {
  largest_of_chunks(row, size, largests.data());
  const auto chunk = std::max_element(largests.begin(), largests.end());
  int64_t id = (chunk - largests.begin()) * kChunk;
  while (row[id] != *chunk && id + 1 < size) ++id;
  return id;
}

// Args: logits float [rows, vocab]; banned ids int64 [banned]. Returns the largest logit that is not banned, and its id,
// [rows, 1]; of equal logits the first. The logit is -inf if all are banned, and NaN if one is NaN.
inline void best_token(Context& context) {
  const Tensor logits = context.input(0), banned = context.input(1);
  if (!context.require(logits.dims.size() == 2 && logits.dims[1] > 0, "BestToken takes rows of logits")) return;
  const int64_t rows = logits.dims[0], vocab = logits.dims[1];
  for (int64_t i = 0; i < banned.size; ++i) {
    const int64_t id = banned.as<int64_t>()[i];
    if (!context.require(id >= 0 && id < vocab, "there is no such token to ban")) return;
  }
  auto* largest = static_cast<float*>(context.output(0, {rows, 1}));
  auto* ids = static_cast<int64_t*>(context.output(1, {rows, 1}));
  if (context.status()) return;
  std::vector<float> allowed(vocab), largests(chunks_of(vocab));
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(logits.as<float>() + row * vocab, vocab, allowed.begin());
    const bool is_number = !has_nan(allowed.data(), vocab);
    for (int64_t i = 0; i < banned.size; ++i) allowed[banned.as<int64_t>()[i]] = -INFINITY;
    ids[row] = first_of_largest(allowed.data(), vocab, largests);
    largest[row] = is_number ? allowed[ids[row]] : NAN;
  }
}

}  // namespace tfexport::TARGET
