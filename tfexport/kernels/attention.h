// Attention of the few queries of a decoder step, each to its own keys, and of all tokens of a source to each other.
//
// ONNX Runtime's operators call a matrix product for each row and head, and the calls cost more than the products. Beams need
// six operators per layer to write their cache and to mask the past of other hypotheses. These kernels read a head's keys and
// values into the CPU's cache once for all hypotheses of a sentence, and only use the slots that a hypothesis sees.
namespace tfexport::TARGET {

// The valid slots of a cache: those of a list, or the first ones if there is no list.
struct Slots {
  const int32_t* list;
  int32_t count;

  INLINED int64_t operator[](int32_t i) const { return list ? list[i] : i; }
};

// The attention of one place of a cache: a row of greedy search, or a sentence with the hypotheses of its beam.
struct Place {
  const float* query;     // [queries, stride]
  const float* keys;      // [heads, slots, dim]
  const float* values;    // the same
  float* mixed;           // [queries, heads * dim]
  const Slots* seen;      // [queries + 1]: the slots that each query sees, and those that any query sees
  int64_t queries, stride, slots, heads, dim;
};

// softmax(query * keys / sqrt(dim)) * values of one query and head. The result of a query that sees nothing is 0.
template <int kDim>
INLINED void attend(const float* query, const float* keys, const float* values, Slots seen, float* scores, float* mixed) {
  constexpr int kParts = kDim / kLanes;
  const float scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  Floats scaled[kParts], sums[kParts] = {};
  for (int part = 0; part < kParts; ++part) scaled[part] = load(query + part * kLanes) * scale;
  const auto several = [&](int32_t i) INLINED_LAMBDA {
    Floats products[kTogether];
    for (int32_t k = 0; k < kTogether; ++k) {
      const float* key = keys + seen[std::min(i + k, seen.count - 1)] * kDim;
      products[k] = scaled[0] * load(key);
      for (int part = 1; part < kParts; ++part) products[k] += scaled[part] * load(key + part * kLanes);
    }
    return sums_of(products);
  };
  Floats mosts = all(-INFINITY), totals = {};
  for (int32_t i = 0; i < seen.count; i += kLanes) {
    const Half half = several(i);
    const Floats both = beside(half, i + kTogether < seen.count ? several(i + kTogether) : half);
    const Floats found = select(lane_numbers() < seen.count - i, both, all(-INFINITY));
    store(scores + i, found);
    mosts = larger(found, mosts);
  }
  const float most = largest(mosts);  // if it is -inf, all weights are NaN, as they should be
  for (int32_t i = 0; i < seen.count; i += kLanes) {
    const Floats weights = exp_of_negative(load(scores + i) - most);
    store(scores + i, weights);
    totals += weights;
  }
  Floats more[kParts] = {};  // sums of every second slot, so that an addition need not wait for the one before
  for (int32_t i = 0; i < seen.count; i += 2) {
    const float* value = values + seen[i] * kDim;
    for (int part = 0; part < kParts; ++part) sums[part] += scores[i] * load(value + part * kLanes);
    if (i + 1 == seen.count) break;
    const float* next = values + seen[i + 1] * kDim;
    for (int part = 0; part < kParts; ++part) more[part] += scores[i + 1] * load(next + part * kLanes);
  }
  const float norm = seen.count ? 1.0f / sum(totals) : 0.0f;
  for (int part = 0; part < kParts; ++part) store(mixed + part * kLanes, (sums[part] + more[part]) * norm);
}

// Prefetches a part of the keys and values of a head that any query sees. They are too far apart for the CPU's own
// prefetching, and waiting for them would take as long as the computation.
template <int kDim>
INLINED void fetch(const Place& place, int64_t head, int64_t part, int64_t parts) {
  const Slots& seen = place.seen[place.queries];
  // Only addresses are computed and nothing is read, because the head may not exist.
  const auto keys = reinterpret_cast<uintptr_t>(place.keys), values = reinterpret_cast<uintptr_t>(place.values);
  for (int64_t i = part; i < seen.count; i += parts) {
    const int64_t start = (head * place.slots + seen[i]) * kDim;
    for (int64_t number = start; number < start + kDim; number += kLanes) {
      __builtin_prefetch(reinterpret_cast<const float*>(keys + number * sizeof(float)));
      __builtin_prefetch(reinterpret_cast<const float*>(values + number * sizeof(float)));
    }
  }
}

template <int kDim>
INLINED void every_head(const Place& place, float* scores) {
  fetch<kDim>(place, 0, 0, 1);  // again, except for the first place: the place before prefetched the slots that it sees itself
  for (int64_t head = 0; head < place.heads; ++head) {
    const int64_t start = head * place.slots * kDim;
    for (int64_t query = 0; query < place.queries; ++query) {
      // Each query prefetches a part, because the number of pending loads is limited. After the last head follows the next
      // place, which sees about the same slots.
      fetch<kDim>(place, head + 1, query, place.queries);
      attend<kDim>(place.query + query * place.stride + head * kDim, place.keys + start, place.values + start,
                   place.seen[query], scores, place.mixed + (query * place.heads + head) * kDim);
    }
  }
}

// Whether there is a kernel for heads of this size. `calls_attention_functions` in dialects.py has the same condition.
inline bool has_kernel(int64_t dim) { return dim > 0 && dim % kLanes == 0 && dim <= 128; }

static void attend_place(const Place& place, float* scores) {
  switch (place.dim) {
    case 16: return every_head<16>(place, scores);
    case 32: return every_head<32>(place, scores);
    case 48: return every_head<48>(place, scores);
    case 64: return every_head<64>(place, scores);
    case 80: return every_head<80>(place, scores);
    case 96: return every_head<96>(place, scores);
    case 112: return every_head<112>(place, scores);
    case 128: return every_head<128>(place, scores);
  }
}

constexpr double kSourceMultiplications = 2e10;  // assumed multiplications of a CPU per second, to decide how many threads to wake

// The attention of all tokens of a source to each other. Rows are [tokens, stride], and a head is `dim` adjacent numbers.
struct Source {
  const float *query, *key, *value;  // [tokens, stride]
  float* mixed;                      // the same
  int64_t tokens, stride, dim;
  int64_t length;  // the first tokens, which all tokens see; the rest is padding
};

constexpr int kQueries = 4;  // rows of a tile, so that each loaded value is used four times

// Products of `kQueries` rows [size] with a block [size, 16] of a matrix, each summed in order.
INLINED void multiply_tile(const float* const (&rows)[kQueries], const float* block, int64_t size, Floats (&sums)[kQueries]) {
  for (int r = 0; r < kQueries; ++r) sums[r] = Floats{};
  for (int64_t i = 0; i < size; ++i) {
    const Floats numbers = load(block + i * kLanes);
    for (int r = 0; r < kQueries; ++r) sums[r] += rows[r][i] * numbers;
  }
}

// softmax(query * keys / sqrt(dim)) * values of a head; 0 for a source of length 0. `memory` has room for `source_memory` numbers:
// the keys in blocks [dim, 16] and the values in blocks [length, 16], so that a tile reads adjacent memory, and the rows of a tile.
static void attend_source(const Source& source, float* memory) {
  const int64_t dim = source.dim, length = source.length, padded = (length + kLanes - 1) / kLanes * kLanes;
  float *columns = memory, *values = columns + dim * padded, *scaled = values + dim * length;
  float* scores = scaled + kQueries * dim;
  std::fill_n(columns, dim * padded, 0.0f);
  for (int64_t j = 0; j < length; ++j) {
    float* column = columns + j / kLanes * kLanes * dim + j % kLanes;
    for (int64_t i = 0; i < dim; ++i) column[i * kLanes] = source.key[j * source.stride + i];
    for (int64_t i = 0; i < dim; i += kLanes) store(values + i * length + j * kLanes, load(source.value + j * source.stride + i));
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t first = 0; first < source.tokens; first += kQueries) {
    const int64_t queries = std::min<int64_t>(kQueries, source.tokens - first);
    const float *rows[kQueries], *weights[kQueries];
    float norms[kQueries];
    for (int r = 0; r < kQueries; ++r) {
      const float* query = source.query + (first + std::min<int64_t>(r, queries - 1)) * source.stride;
      for (int64_t i = 0; i < dim; ++i) scaled[r * dim + i] = query[i] * scale;
      rows[r] = scaled + r * dim;
      weights[r] = scores + r * padded;
    }
    Floats sums[kQueries], mosts[kQueries];
    for (int r = 0; r < kQueries; ++r) mosts[r] = all(-INFINITY);
    for (int64_t j = 0; j < length; j += kLanes) {
      multiply_tile(rows, columns + j * dim, dim, sums);
      const Ints exists = lane_numbers() < static_cast<int32_t>(length - j);
      for (int r = 0; r < kQueries; ++r) {
        const Floats found = select(exists, sums[r], all(-INFINITY));
        store(scores + r * padded + j, found);
        mosts[r] = larger(found, mosts[r]);
      }
    }
    for (int r = 0; r < kQueries; ++r) {
      const float most = largest(mosts[r]);  // if it is -inf, all weights are NaN, as they should be
      Floats totals = {};
      for (int64_t j = 0; j < length; j += kLanes) {
        const Floats found = exp_of_negative(load(weights[r] + j) - most);
        store(scores + r * padded + j, found);
        totals += found;
      }
      norms[r] = length ? 1.0f / sum(totals) : 0.0f;
    }
    for (int64_t i = 0; i < dim; i += kLanes) {
      multiply_tile(weights, values + i * length, length, sums);
      for (int r = 0; r < queries; ++r) store(source.mixed + (first + r) * source.stride + i, sums[r] * norms[r]);
    }
  }
}

inline int64_t source_memory(int64_t length, int64_t dim) { return (2 * dim + kQueries) * (length + kLanes) + kQueries * dim; }

// Memory that a thread reuses.
struct Scratch {
  std::vector<float> scores;
  std::vector<int32_t> lists;
  std::vector<uint8_t> any;
  std::vector<Slots> seen;

  static Scratch& of(int64_t queries, int64_t slots, bool masked) {
    static thread_local Scratch scratch;
    scratch.scores.resize(slots + kLanes);
    if (masked) {
      scratch.lists.resize((queries + 1) * slots);
      scratch.any.resize(slots);
    }
    scratch.seen.resize(queries + 1);
    return scratch;
  }
};

// A cache [places, heads, slots, dim], and the sizes of the rows that attend to it.
struct CacheShape {
  int64_t places, heads, slots, dim, width, queries;

  // Args: rows [.., parts * width], the rows of all queries of all places.
  CacheShape(Context& context, const Tensor& rows, int64_t parts, const Tensor& keys, const Tensor& values) {
    if (!context.require(keys.dims.size() == 4 && keys.dims == values.dims && keys.size > 0 && keys.dims[2] < INT32_MAX,
                         "keys and values are [places, heads, slots, head_dim], of the same size")) {
      return;
    }
    places = keys.dims[0], heads = keys.dims[1], slots = keys.dims[2], dim = keys.dims[3], width = heads * dim;
    queries = rows.size / (places * parts * width);
    context.require(has_kernel(dim), "head_dim is a multiple of 16 up to 128");
    context.require(!rows.dims.empty() && rows.last() == parts * width && queries > 0 &&
                        rows.size == places * queries * parts * width,
                    "the rows are not those of this cache");
  }
};

inline float* like(Context& context, size_t index, const Tensor& rows, int64_t width) {
  Dims dims = rows.dims;
  dims.back() = width;
  return static_cast<float*>(context.output(index, dims));
}

// The cache as an output: the same buffer if past and present share one, or else a copy.
inline float* present(Context& context, size_t index, const Tensor& past) {
  auto* data = static_cast<float*>(context.output(index, past.dims));
  if (data && data != past.data) std::memcpy(data, past.data, past.size * sizeof(float));
  return data;
}

// Writes the seen slots before `end` into `list`.
static Slots list_seen(const uint8_t* sees, int32_t end, int32_t* list) {
  int32_t count = 0;
  for (int32_t i = 0; i < end; ++i) {
    list[count] = i;
    count += sees[i] != 0;  // compared as bytes: a file may have bools other than 0 and 1
  }
  return {list, count};
}

// Copies the heads of a row, each [dim], to one of the slots of a cache [heads, slots, dim].
static void write_slot(const float* row, const CacheShape& cache, int64_t slot, float* tensor) {
  for (int64_t head = 0; head < cache.heads; ++head) {
    float* to = tensor + (head * cache.slots + slot) * cache.dim;
    for (int64_t i = 0; i < cache.dim; i += kLanes) store(to + i, load(row + head * cache.dim + i));
  }
}

// Writes the new keys and values of all queries of a place from `slots[place]` on, and attends.
//
// Args: query_key_value float [.., 3 * width]; past keys and values; slot [places]; with `kMasked` also the slots that each
// query sees, including its own new slot, bool [places, 1, queries, slots]. Without it, a query sees all slots up to its own.
template <typename Index, bool kMasked>
void self_attention(Context& context) {
  const Tensor rows = context.input(0), key = context.input(1), value = context.input(2), slot = context.input(3);
  const Tensor mask = kMasked ? context.input(4) : Tensor();
  const CacheShape cache(context, rows, 3, key, value);
  if (context.status()) return;
  context.require(slot.size == cache.places, "there is one slot a place");
  context.require(kMasked ? mask.size == cache.places * cache.queries * cache.slots : cache.queries == 1,
                  "the mask is not of this cache");
  if (context.status()) return;
  for (int64_t place = 0; place < cache.places; ++place) {
    const int64_t at = slot.as<Index>()[place];
    if (!context.require(at >= 0 && at <= cache.slots - cache.queries, "the cache is full")) return;
  }
  float* mixed = like(context, 0, rows, cache.width);
  float* keys = present(context, 1, key);
  float* values = present(context, 2, value);
  if (context.status()) return;

  Scratch& scratch = Scratch::of(cache.queries, cache.slots, kMasked);
  const int64_t stride = 3 * cache.width, size = cache.heads * cache.slots * cache.dim;
  for (int64_t place = 0; place < cache.places; ++place) {
    const int64_t at = slot.as<Index>()[place];
    const float* own = rows.as<float>() + place * cache.queries * stride;
    for (int64_t query = 0; query < cache.queries; ++query) {
      const float* row = own + query * stride;
      write_slot(row + cache.width, cache, at + query, keys + place * size);
      write_slot(row + 2 * cache.width, cache, at + query, values + place * size);
    }
    const auto end = static_cast<int32_t>(at + cache.queries);
    if (kMasked) {
      const uint8_t* sees = mask.as<uint8_t>() + place * cache.queries * cache.slots;
      std::fill_n(scratch.any.begin(), end, 0);
      for (int64_t query = 0; query < cache.queries; ++query, sees += cache.slots) {
        for (int32_t i = 0; i < end; ++i) scratch.any[i] |= sees[i];
        scratch.seen[query] = list_seen(sees, end, scratch.lists.data() + query * cache.slots);
      }
      scratch.seen[cache.queries] = list_seen(scratch.any.data(), end, scratch.lists.data() + cache.queries * cache.slots);
    } else {
      std::fill(scratch.seen.begin(), scratch.seen.end(), Slots{nullptr, end});
    }
    attend_place({own, keys + place * size, values + place * size, mixed + place * cache.queries * cache.width,
                  scratch.seen.data(), cache.queries, stride, cache.slots, cache.heads, cache.dim},
                 scratch.scores.data());
  }
}

// Args: query float [.., width]; keys and values; length int32 [places], the number of valid slots.
inline void cross_attention(Context& context) {
  const Tensor rows = context.input(0), key = context.input(1), value = context.input(2), length = context.input(3);
  const CacheShape cache(context, rows, 1, key, value);
  if (context.status()) return;
  if (!context.require(length.size == cache.places, "there is one length a place")) return;
  for (int64_t place = 0; place < cache.places; ++place) {
    const int32_t count = length.as<int32_t>()[place];
    if (!context.require(count >= 0 && count <= cache.slots, "a length is larger than there are keys")) return;
  }
  float* mixed = like(context, 0, rows, cache.width);
  if (context.status()) return;

  Scratch& scratch = Scratch::of(cache.queries, cache.slots, false);
  const int64_t size = cache.heads * cache.slots * cache.dim, own = cache.queries * cache.width;
  for (int64_t place = 0; place < cache.places; ++place) {
    std::fill(scratch.seen.begin(), scratch.seen.end(), Slots{nullptr, length.as<int32_t>()[place]});
    attend_place({rows.as<float>() + place * own, key.as<float>() + place * size, value.as<float>() + place * size,
                  mixed + place * own, scratch.seen.data(), cache.queries, cache.width, cache.slots, cache.heads,
                  cache.dim},
                 scratch.scores.data());
  }
}

// Args: query float [.., width]; keys and values [places, tokens, heads, dim]; length int32 [places], the number of tokens that
// are no padding. A head of a source is a task for a thread.
inline void source_attention(Context& context) {
  const Tensor query = context.input(0), key = context.input(1), value = context.input(2), length = context.input(3);
  context.require(key.dims.size() == 4 && key.dims == value.dims && key.size > 0 && key.dims[1] < INT32_MAX,
                  "keys and values are [places, tokens, heads, head_dim], of the same size, and none is empty");
  if (context.status()) return;
  const int64_t places = key.dims[0], tokens = key.dims[1], heads = key.dims[2], dim = key.dims[3], width = heads * dim;
  context.require(has_kernel(dim), "head_dim is a multiple of 16 up to 128");
  context.require(query.last() == width && query.size == key.size && length.size == places,
                  "there is a query for each key, and a length for each place");
  for (int64_t place = 0; place < places && !context.status(); ++place) {
    const int32_t count = length.as<int32_t>()[place];
    context.require(count >= 0 && count <= tokens, "a length is larger than there are tokens");
  }
  float* mixed = context.status() ? nullptr : like(context, 0, query, width);
  if (context.status()) return;

  const int64_t each = places * heads;
  const double seconds = 4.0 * each * tokens * tokens * dim / kSourceMultiplications;
  const int64_t tasks = std::clamp<int64_t>(seconds / kTask, 1, each);
  context.parallel(tasks, [&](int64_t task) {
    static thread_local std::vector<float> memory;
    for (int64_t at = each * task / tasks; at < each * (task + 1) / tasks; ++at) {
      const int64_t place = at / heads, start = place * tokens * width + at % heads * dim;
      const int32_t count = length.as<int32_t>()[place];
      memory.resize(std::max<size_t>(memory.size(), source_memory(count, dim)));
      attend_source({query.as<float>() + start, key.as<float>() + start, value.as<float>() + start, mixed + start, tokens, width,
                     dim, count},
                    memory.data());
    }
  });
}

}  // namespace tfexport::TARGET
