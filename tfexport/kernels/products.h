// Products of rows with the weights of a projection, in float32 and in 8 bits. Where a target has none, these operators are not
// registered, and their definitions run.
//
// Weights are stored in blocks of 48 outputs: float32 [blocks, in, 48], and int8 [blocks, in / 4, 48, 4], with four adjacent
// inputs for the instruction. The rest of the last block is 0. The file has 8-bit weights in this order, and they are read from
// its mapping. ONNX Runtime brings float32 weights into this order when it loads a graph.
//
// With one row, the memory limits the speed: weights are read once, from first to last, except those of inputs that a ReLU
// makes 0. With many rows, a tile of some rows and outputs stays in registers, so that each loaded value is used several times.
#if TARGET_HAS_PRODUCTS

// A loop over the registers of a tile.
#define UNROLLED _Pragma("GCC unroll 12")

namespace tfexport::TARGET {

constexpr int64_t kBlock = 48;                // outputs with adjacent weights
constexpr int64_t kAhead = 8192;              // bytes to fetch in advance: the CPU's own prefetching stops at each page
constexpr int64_t kListAhead = 32;            // listed inputs to fetch in advance
constexpr int64_t kSummed = 256;              // inputs whose float32 products are one sum, as in ONNX Runtime's Gemm
constexpr int64_t kFewRows = 8;               // most rows that are searched for inputs that a ReLU makes 0 in all of them
constexpr double kWorthListing = 0.8;         // largest share of inputs to list; above it, using all inputs takes no longer
constexpr int64_t kMostInputs = 65536;        // most inputs for which sums of 8-bit products always fit into 32 bits
constexpr int64_t kLine = 64;                 // bytes that a prefetch brings

// Assumed speed of a CPU in multiplications and bytes of weights per second, to decide when waking up a thread is worthwhile.
constexpr double kMultiplications = 1e11, kInt8Multiplications = 4e11, kBytes = 8e10;

// The number of registers of outputs in a tile of `rows` rows. It divides the number `in_block`, and the registers suffice for the
// sums, for the weights or the rows, whichever are fewer, and `extra` ones.
constexpr int tile_width(int rows, int in_block, int extra) {
  int width = in_block;
  while (in_block % width || rows * width + std::min(rows, width) + extra > kRegisters) --width;
  return width;
}

// Prefetches what is `kAhead` bytes after `from`, once for each cache line of registers of `size` bytes.
INLINED void prefetch(const void* from, int64_t size, int number) {
  if (number * size % kLine == 0) __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) + kAhead));
}

// Adds products to the sums of a tile. What there is less of, weights or rows, stays in registers.
template <typename Weight, typename Row, int kRows, int kWidth, typename Sum, typename WeightAt, typename RowAt, typename Add>
INLINED void add_tile(Sum (&sums)[kRows][kWidth], WeightAt weight_at, RowAt row_at, Add add) {
  if (kRows < kWidth) {
    Row taken[kRows];
    UNROLLED for (int r = 0; r < kRows; ++r) taken[r] = row_at(r);
    UNROLLED for (int w = 0; w < kWidth; ++w) {
      const Weight weight = weight_at(w);
      UNROLLED for (int r = 0; r < kRows; ++r) sums[r][w] = add(taken[r], weight, sums[r][w]);
    }
  } else {
    Weight taken[kWidth];
    UNROLLED for (int w = 0; w < kWidth; ++w) taken[w] = weight_at(w);
    UNROLLED for (int r = 0; r < kRows; ++r) {
      const Row row = row_at(r);
      UNROLLED for (int w = 0; w < kWidth; ++w) sums[r][w] = add(row, taken[w], sums[r][w]);
    }
  }
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

  static constexpr int kOutputs = kFloatLanes, kExtraRegisters = kFloatExtraRegisters;

  // A tile of rows and registers of outputs, from `column` on. It is a separate function, because GCC spills registers of the
  // innermost loop to the stack if it sees the loops of other tiles next to it.
  template <int kRows, int kWidth>
  __attribute__((noinline)) void tile(int64_t row, int64_t column, float* result) const {
    for (int64_t input = 0, start = 0, end; input < stride; input += kSummed, start = end) {
      end = kListed ? std::lower_bound(listed + start, listed + used, input + kSummed) - listed : std::min(input + kSummed, used);
      add_inputs<kRows, kWidth>(row, column, start, end, input ? nullptr : bias, result);
    }
  }

  // Adds the inputs from `start` to `end` to `added` in each row, or without it to `result`, because no registers are left for
  // the earlier sums.
  template <int kRows, int kWidth>
  INLINED void add_inputs(int64_t row, int64_t column, int64_t start, int64_t end, const float* added, float* result) const {
    FloatRegister sums[kRows][kWidth];
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int w = 0; w < kWidth; ++w) sums[r][w] = no_floats();
    }
    const float* numbers = rows + row * stride;
    const float* block = weights + column / kBlock * kBlock * stride + column % kBlock;
    for (int64_t place = start; place < end; ++place) {
      const int64_t i = kListed ? listed[place] : place;
      const auto weights_at = [&](int w) INLINED_LAMBDA {
        const float* from = block + i * kBlock + w * kFloatLanes;
        if (kListed) {
          __builtin_prefetch(block + listed[place + kListAhead] * kBlock + w * kFloatLanes);
        } else {
          prefetch(from, sizeof(FloatRegister), w);
        }
        return load_register(from);
      };
      const auto number_at = [&](int r) INLINED_LAMBDA {
        const FloatRegister number = broadcast(numbers + r * stride + i);
        return kRectified ? rectified(number) : number;
      };
      add_tile<FloatRegister, FloatRegister>(sums, weights_at, number_at, multiply_add);
    }
    UNROLLED for (int w = 0; w < kWidth; ++w) {
      const int64_t first = column + w * kFloatLanes, left = columns - first;
      UNROLLED for (int r = 0; r < kRows; ++r) {
        float* to = result + (row + r) * columns + first;
        const float* before = added ? added + first : to;
        if (left >= kFloatLanes) {
          store_register(to, load_register(before) + sums[r][w]);
        } else {
          float some[kFloatLanes];
          store_register(some, sums[r][w]);
          for (int64_t i = 0; i < left; ++i) to[i] = before[i] + some[i];
        }
      }
    }
  }
};

// Rows in 8 bits, each with a scale: signed, or unsigned after a ReLU.
struct RoundedRows {
  std::vector<Number> numbers;  // [count, stride]
  std::vector<int32_t> start;   // initial value of the sums of each row
  std::vector<float> scale;

  RoundedRows(int64_t count, int64_t stride) : numbers(count * stride), start(count), scale(count) {}

  // Sets a row from numbers in 8 bits, whose sum is `sum`.
  template <bool kRectified>
  void set(int64_t row, const uint8_t* eight_bits, int64_t stride, int32_t sum) {
    Number* to = numbers.data() + row * stride;
    constexpr uint8_t kFlip = kRectified && kShiftsRectified ? 128 : 0;
    for (int64_t i = 0; i < stride; ++i) {
      const auto number = static_cast<uint8_t>(eight_bits[i] ^ kFlip);
      to[i] = kRectified && !kShiftsRectified ? static_cast<Number>(number) : static_cast<Number>(static_cast<int8_t>(number));
    }
    start[row] = kFlipsWeights && !kRectified ? -128 * sum : 0;
  }
};

template <bool kRectified>
struct Int8Product {
  const RoundedRows& rows;
  const int8_t* weights;  // [blocks, stride / 4, 48, 4]
  const float* scale;     // [columns]
  const float* bias;      // [columns]
  int64_t count, stride, columns;

  static constexpr int kOutputs = kDotOutputs, kExtraRegisters = kDotExtraRegisters;

  double seconds() const {
    const double size = static_cast<double>(stride) * columns;
    return std::max(size * count / kInt8Multiplications, size / kBytes);
  }

  template <int kRows, int kWidth>
  __attribute__((noinline)) void tile(int64_t row, int64_t column, float* result) const {
    constexpr bool kShifts = kRectified && kShiftsRectified;
    Sums sums[kRows][kWidth], weight_sums[kShifts ? kWidth : 1];
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int w = 0; w < kWidth; ++w) sums[r][w] = first_sums(rows.start[row + r]);
    }
    UNROLLED for (int w = 0; w < (kShifts ? kWidth : 1); ++w) weight_sums[w] = first_sums(0);
    const Number* numbers = rows.numbers.data() + row * stride;
    const int8_t* block = weights + column / kBlock * kBlock * stride + column % kBlock * kGroup;
    const Number ones[kGroup] = {1, 1, 1, 1};
    for (int64_t i = 0; i < stride; i += kGroup) {
      const auto weights_at = [&](int w) INLINED_LAMBDA {
        const int8_t* from = block + i * kBlock + w * kDotOutputs * kGroup;
        prefetch(from, kDotOutputs * kGroup, w);
        const Weights taken = load_weights<kRectified>(from);
        if (kShifts) weight_sums[w] = add_products<false>(broadcast(ones), taken, weight_sums[w]);
        return taken;
      };
      const auto numbers_at = [&](int r) INLINED_LAMBDA { return broadcast(numbers + r * stride + i); };
      add_tile<Weights, InputGroup>(sums, weights_at, numbers_at, add_products<kRectified>);
    }
    UNROLLED for (int w = 0; w < kWidth; ++w) {
      const int64_t first = column + w * kDotOutputs, left = columns - first;
      float factors[kDotOutputs] = {}, more[kDotOutputs] = {};
      if (left < kDotOutputs) {
        std::copy_n(scale + first, std::max<int64_t>(left, 0), factors);
        std::copy_n(bias + first, std::max<int64_t>(left, 0), more);
      }
      const DotFloats factor = load_factors(left < kDotOutputs ? factors : scale + first);
      const DotFloats addend = load_factors(left < kDotOutputs ? more : bias + first);
      UNROLLED for (int r = 0; r < kRows; ++r) {
        const Sums all = kShifts ? add_times_128(sums[r][w], weight_sums[w]) : sums[r][w];
        const DotFloats product = to_floats(all) * factor * rows.scale[row + r] + addend;
        float* to = result + (row + r) * columns + first;
        if (left >= kDotOutputs) {
          std::memcpy(to, &product, sizeof product);
        } else {
          float some[kDotOutputs];
          std::memcpy(some, &product, sizeof product);
          for (int64_t i = 0; i < left; ++i) to[i] = some[i];
        }
      }
    }
  }
};

// Multiplies `kRows` rows with the outputs of a block, of which some may not exist.
template <int kRows, typename Product>
void multiply_rows(const Product& product, int64_t row, int64_t column, float* result) {
  constexpr int kWidth = tile_width(kRows, kBlock / Product::kOutputs, Product::kExtraRegisters);
  const int64_t end = std::min(column + kBlock, product.columns);
  for (int64_t first = column; first < end; first += kWidth * Product::kOutputs) {
    product.template tile<kRows, kWidth>(row, first, result);
  }
}

// Multiplies all rows with the outputs of a block, in tiles of about the same number of rows.
template <typename Product>
void multiply_block(const Product& product, int64_t column, float* result) {
  int64_t tiles = (product.count + kMostRows - 1) / kMostRows;
  for (int64_t row = 0, rows; row < product.count; row += rows, --tiles) {
    rows = (product.count - row + tiles - 1) / tiles;
    switch (rows) {
      case 8: multiply_rows<std::min(8, kMostRows)>(product, row, column, result); break;
      case 7: multiply_rows<std::min(7, kMostRows)>(product, row, column, result); break;
      case 6: multiply_rows<6>(product, row, column, result); break;
      case 5: multiply_rows<5>(product, row, column, result); break;
      case 4: multiply_rows<4>(product, row, column, result); break;
      case 3: multiply_rows<3>(product, row, column, result); break;
      case 2: multiply_rows<2>(product, row, column, result); break;
      case 1: multiply_rows<1>(product, row, column, result); break;
    }
  }
}

// Multiplies all rows with all columns into `result` [count, columns], with the threads of the session.
template <typename Product>
void multiply(Context& context, const Product& product, float* result) {
  const int64_t blocks = (product.columns + kBlock - 1) / kBlock;
  const int64_t tasks = std::clamp<int64_t>(product.seconds() / kTask, 1, blocks);
  context.parallel(tasks, [&](int64_t task) {
    for (int64_t block = blocks * task / tasks; block < blocks * (task + 1) / tasks; ++block) {
      multiply_block(product, block * kBlock, result);
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
inline int64_t list_positive(const float* rows, int64_t count, int64_t size, std::vector<int32_t>& list) {
  list.resize(size + kListAhead + kLanes);  // because whole registers are stored
  int64_t used = 0;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Ints left = {};
    for (int64_t row = 0; row < count; ++row) left |= ~(load(rows + row * size + i) <= 0.0f);  // "not" keeps NaN
#if defined(TARGET_AVX512)
    const auto flags = reinterpret_cast<__m512i>(left.piece[0]);
    const auto inputs = reinterpret_cast<__m512i>((lane_numbers() + static_cast<int32_t>(i)).piece[0]);
    const __mmask16 is_left = _mm512_test_epi32_mask(flags, flags);
    _mm512_storeu_si512(list.data() + used, _mm512_maskz_compress_epi32(is_left, inputs));
    used += __builtin_popcount(is_left);
#else
    int32_t flags[kLanes];
    store(flags, left);
    for (int lane = 0; lane < kLanes; ++lane) {
      list[used] = static_cast<int32_t>(i + lane);
      used -= flags[lane];  // -1 is true
    }
#endif
  }
  for (; i < size; ++i) {
    bool is_left = false;
    for (int64_t row = 0; row < count; ++row) is_left |= !(rows[row * size + i] <= 0.0f);
    list[used] = static_cast<int32_t>(i);
    used += is_left;
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
    static thread_local std::vector<uint8_t> eight_bits;
    eight_bits.resize(size);
    for (int64_t row = count * task / tasks; row < count * (task + 1) / tasks; ++row) {
      int32_t sum = 0;
      rows.scale[row] = quantize<kRectified>(states.as<float>() + row * size, size, eight_bits.data(), sum);
      rows.set<kRectified>(row, eight_bits.data(), size, sum);
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
  std::vector<uint8_t> eight_bits(size);
  for (int64_t row = 0; row < count; ++row) {
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t number = numbers.as<uint8_t>()[row * size + i] - kZeroOfStates;
      eight_bits[i] = static_cast<uint8_t>(number);
      sum += number;
    }
    rows.set<false>(row, eight_bits.data(), size, sum);
    rows.scale[row] = 1;
  }
  const Int8Product<false> product = {rows, weights.as<int8_t>(), scale.as<float>(), room.as<float>(), count, size, columns};
  multiply(context, product, result);
}

}  // namespace tfexport::TARGET

#undef UNROLLED

#endif
