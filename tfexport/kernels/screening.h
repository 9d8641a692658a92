// Both ends of screening: `graphs/screening.py` has the method and its proof.
namespace tfexport::TARGET {

constexpr int kLevels = 63;       // largest magnitude of rounded states
constexpr int kZeroOfStates = kLevels + 1;
constexpr int kCandidates = 16;   // words that are multiplied in float32

// Rounds numbers to integer multiples, of at most 63, of a scale, and stores them plus 64. Returns the scale, and in multiples
// of it the lengths of the rounded numbers and of the rounding error.
static float round_states(const float* numbers, int64_t size, uint8_t* rounded_to, float& length, float& lost) {
  Floats magnitudes = {}, zeros = {}, lengths = {}, losses = {};
  float last = 0, last_zero = 0, last_length = 0, last_lost = 0;
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        magnitudes = larger(magnitudes, magnitude(load(numbers + i)));
        zeros += load(numbers + i) * 0.0f;  // NaN if a number is not finite
      },
      [&](int64_t i) INLINED_LAMBDA {
        last = std::max(last, std::fabs(numbers[i]));
        last_zero += numbers[i] * 0.0f;
      });
  float scale = std::max(largest(magnitudes), last) * (1.0f / kLevels);
  scale = std::max(scale, FLT_MIN) + (sum(zeros) + last_zero);
  if (!(scale <= FLT_MAX)) {
    std::memset(rounded_to, kZeroOfStates, size);
    length = lost = scale;
    return scale;
  }
  by_lanes(
      size,
      [&](int64_t i) INLINED_LAMBDA {
        const Floats exact = load(numbers + i) / scale, whole = rounded(exact);
        lengths += whole * whole;
        losses += (exact - whole) * (exact - whole);
        store_bytes(rounded_to + i, to_ints(whole) + kZeroOfStates);
      },
      [&](int64_t i) INLINED_LAMBDA {
        const float exact = numbers[i] / scale, whole = std::nearbyint(exact);
        last_length += whole * whole;
        last_lost += (exact - whole) * (exact - whole);
        rounded_to[i] = static_cast<uint8_t>(static_cast<int32_t>(whole) + kZeroOfStates);
      });
  length = std::sqrt(sum(lengths) + last_length);
  lost = std::sqrt(sum(losses) + last_lost);
  return scale;
}

static void add_scaled(const float* a, float by, const float* b, float and_by, int64_t size, float* result) {
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { store(result + i, load(a + i) * by + load(b + i) * and_by); },
      [&](int64_t i) INLINED_LAMBDA { result[i] = a[i] * by + b[i] * and_by; });
}

// Args: states float [rows, d_model]; the lengths of each word's weights and of their rounding error, [vocab]. Returns states in
// 7 bits, uint8 [rows, d_model], their scales [rows, 1], and the amount by which a word's logit may exceed the rounded one,
// [vocab], in multiples of these scales.
inline void screen_states(Context& context) {
  const Tensor states = context.input(0), norms = context.input(1), errors = context.input(2);
  context.require(states.dims.size() == 2 && norms.dims.size() == 1 && errors.dims == norms.dims,
                  "ScreenStates takes rows, and two lengths of each word");
  if (context.status()) return;
  const int64_t rows = states.dims[0], size = states.dims[1], vocab = norms.size;
  auto* numbers = static_cast<uint8_t*>(context.output(0, states.dims));
  auto* scales = static_cast<float*>(context.output(1, {rows, 1}));
  auto* room = static_cast<float*>(context.output(2, {vocab}));
  if (context.status()) return;
  float longest = 0, most_lost = 0;
  for (int64_t row = 0; row < rows; ++row) {
    float length, lost;
    scales[row] = round_states(states.as<float>() + row * size, size, numbers + row * size, length, lost);
    // A NaN is ignored: its own row is never proven, and the others keep their bounds.
    if (length > longest) longest = length;
    if (lost > most_lost) most_lost = lost;
  }
  add_scaled(norms.as<float>(), most_lost, errors.as<float>(), longest, vocab, room);
}

static float dot(const float* a, const float* b, int64_t size) {
  Floats sums = {};
  float last = 0;
  by_lanes(
      size, [&](int64_t i) INLINED_LAMBDA { sums += load(a + i) * load(b + i); },
      [&](int64_t i) INLINED_LAMBDA { last += a[i] * b[i]; });
  return sum(sums) + last;
}

// Args: bounds float [rows, vocab], in multiples of the scales [rows, 1]; states [rows, d_model]; weight [vocab, d_model];
// bias [vocab]; banned ids int64 [banned]. Returns the largest logit of each row and its word, [rows, 1].
inline void screen_best(Context& context) {
  const Tensor bounds = context.input(0), scales = context.input(1), states = context.input(2);
  const Tensor weight = context.input(3), bias = context.input(4), banned = context.input(5);
  context.require(bounds.dims.size() == 2 && states.dims.size() == 2 && weight.dims.size() == 2 && bias.size > 0 &&
                      bounds.dims[0] == states.dims[0] && scales.size == states.dims[0] &&
                      bounds.dims[1] == weight.dims[0] && bias.size == weight.dims[0] &&
                      states.dims[1] == weight.dims[1],
                  "ScreenBest takes bounds of all words, states, and the weights that they are for");
  for (int64_t i = 0; i < banned.size && !context.status(); ++i) {
    const int64_t id = banned.as<int64_t>()[i];
    context.require(id >= 0 && id < bias.size, "there is no such token to ban");
  }
  if (context.status()) return;
  const int64_t rows = states.dims[0], size = states.dims[1], vocab = weight.dims[0];
  auto* best = static_cast<float*>(context.output(0, {rows, 1}));
  auto* ids = static_cast<int64_t*>(context.output(1, {rows, 1}));
  if (context.status()) return;
  static thread_local std::vector<float> allowed, values;
  allowed.assign(bias.as<float>(), bias.as<float>() + vocab);
  for (int64_t i = 0; i < banned.size; ++i) allowed[banned.as<int64_t>()[i]] = -INFINITY;
  const auto logit = [&](int64_t row, int64_t word) {
    return dot(states.as<float>() + row * size, weight.as<float>() + word * size, size) + allowed[word];
  };
  const int64_t count = std::min<int64_t>(kCandidates, vocab);
  values.resize(vocab);
  Ranking ranking(count);
  std::vector<float> largests(chunks_of(vocab));
  std::vector<Found>& candidates = ranking.found;
  std::vector<int64_t> unproven;
  for (int64_t row = 0; row < rows; ++row) {
    scale_and_add(bounds.as<float>() + row * vocab, scales.as<float>()[row], allowed.data(), vocab, values.data());
    largest_of_chunks(values.data(), vocab, largests.data());
    rank(values.data(), vocab, largests, 0, 0, ranking);
    const float least = candidates.back().log_prob;  // no other word's logit is above
    // Sorted by id, so that of equal logits the first wins.
    std::sort(candidates.begin(), candidates.end(), [](const Found& a, const Found& b) { return a.id < b.id; });
    best[row] = -INFINITY;
    ids[row] = candidates[0].id;
    bool is_number = true;
    for (const Found& candidate : candidates) {
      const float found = logit(row, candidate.id);
      is_number &= found == found;
      if (found > best[row]) best[row] = found, ids[row] = candidate.id;
    }
    // Bounds outside the range of float32 prove nothing.
    is_number &= least >= -FLT_MAX && !has_nan(values.data(), vocab);
    if (!(is_number && best[row] > least)) unproven.push_back(row);
  }
  for (int64_t row : unproven) best[row] = -INFINITY, ids[row] = 0;
  for (int64_t word = 0; word < vocab && !unproven.empty(); ++word) {
    for (int64_t row : unproven) {
      const float found = logit(row, word);
      // A NaN stays, because no number is above it.
      if (found > best[row] || found != found) best[row] = found, ids[row] = word;
    }
  }
}

}  // namespace tfexport::TARGET
