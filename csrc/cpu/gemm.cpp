// Grouped products over the experts of a mixture, and the weighted sum of their results.
//
// A thread takes one item after the other: a block of rows of one expert and a chunk of its weight's columns. The rows
// are packed once per block (they stay in the L2 cache), then each group of kTileColumns weight rows meets all of them
// while it is in the L1 cache. With few rows this is bound by reading the weights, with many by multiply-adds.

#include "gemm.h"

#include <type_traits>

#include "gemm_tile.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

static_assert(kColumnTile % kTileColumns == 0);

template <typename T>
F32 activate(const GroupedGemmArgs& args, F32 gate, F32 up) {
  if (args.clamped) {
    const F32 limit = round_to<T>(splat(args.limit));
    gate = select(gate > limit, limit, gate);
    up = select(up > limit, limit, select(up < -limit, -limit, up));
  }
  switch (args.gate) {
    case Gate::gelu:
    case Gate::gelu_tanh: {
      F32 y;
      for (int i = 0; i < kLanes; ++i) {
        const float x = gate[i];
        y[i] = args.gate == Gate::gelu
                   ? 0.5f * x * (1.f + __builtin_erff(x * 0.70710678118654752f))
                   : 0.5f * x * (1.f + __builtin_tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
      }
      return round_to<T>(y) * up;
    }
    default:
      if (args.alpha == 1.f && args.up_offset == 0.f) return round_to<T>(gate / (1.f + exp(-gate))) * up;
      const F32 gated = round_to<T>(gate * round_to<T>(sigmoid(round_to<T>(gate * args.alpha))));
      return round_to<T>(up + args.up_offset) * gated;
  }
}

template <typename T>
class Worker {
  using U = Unit<T>;
  using Packed = typename U::Packed;

 public:
  Worker(const GroupedGemmArgs& args, int64_t index)
      : args_(args), steps_((args.depth + U::kStep - 1) / U::kStep), product_stride_((args.gate == Gate::none ? 1 : 2) * args.chunk) {
    char* scratch = static_cast<char*>(args.scratch) + index * args.scratch_bytes;
    packed_ = reinterpret_cast<Packed*>(scratch);
    scratch += args.packed_bytes;
    product_ = reinterpret_cast<float*>(scratch);
    columns_ = reinterpret_cast<T*>(scratch + args.product_bytes);
  }

  void run_items() {
    const int64_t chunks = (args_.columns + args_.chunk - 1) / args_.chunk;
    const int64_t items = args_.block_count * chunks;
    const RowBlock* packed_block = nullptr;
    for (int64_t item; (item = __atomic_fetch_add(args_.next_item, 1, __ATOMIC_RELAXED)) < items;) {
      const RowBlock* block = args_.blocks + item / chunks;
      if (block != packed_block) pack_rows(*block);
      packed_block = block;
      const int64_t first = (item % chunks) * args_.chunk;
      const int64_t count = args_.columns - first < args_.chunk ? args_.columns - first : args_.chunk;
      if (args_.gate == Gate::none) {
        multiply(*block, first, 1, count, product_);
        store_product(*block, first, count);
      } else {
        const int64_t gate_column = args_.gate_step * first;
        multiply(*block, gate_column, args_.gate_step, count, product_);
        multiply(*block, gate_column + args_.up_column, args_.gate_step, count, product_ + args_.chunk);
        store_gated(*block, first, count);
      }
    }
  }

 private:
  // Tiles of kTileRows rows one after the other; in a tile, kStep elements of each row in turn. Zeros fill the last step.
  void pack_rows(const RowBlock& block) {
    Packed* out = packed_;
    for (int64_t tile = 0; tile < block.rows; tile += kTileRows) {
      const int rows = block.rows - tile < kTileRows ? int(block.rows - tile) : kTileRows;
      for (int m = 0; m < rows; ++m) {
        const int64_t row = block.first_row + tile + m;
        const T* x = static_cast<const T*>(args_.x) + (args_.x_rows ? args_.x_rows[row] : row) * args_.x_stride;
        for (int64_t step = 0; step < steps_; ++step) {
          const int64_t k = step * U::kStep;
          const int64_t left = args_.depth - k < U::kStep ? args_.depth - k : U::kStep;
          pack(out + (step * rows + m) * U::kStep, x + k, left);
        }
      }
      out += rows * steps_ * U::kStep;
    }
  }

  static void pack(Packed* out, const T* x, int64_t count) {
    if constexpr (std::is_same_v<Packed, T>) {
      if (count == U::kStep) {
        std::memcpy(out, x, U::kStep * sizeof(T));
      } else {
        std::memset(out, 0, U::kStep * sizeof(T));
        std::memcpy(out, x, count * sizeof(T));
      }
    } else {
      const auto values = count == U::kStep ? U::load_weight(x) : U::load_weight_part(x, int(count));
      std::memcpy(out, &values, sizeof(values));
    }
  }

  // product[m, j] = packed row m times the column first + step * j of the weight.
  void multiply(const RowBlock& block, int64_t first, int64_t step, int64_t count, float* product) {
    const T* weight = static_cast<const T*>(args_.weight) + block.expert * args_.expert_stride + first * args_.column_stride;
    int64_t stride = step * args_.column_stride;
    if (args_.depth_stride != 1) {
      copy_columns(weight, stride, count);
      weight = columns_;
      stride = args_.depth;
    }
    for (int64_t n = 0; n < count; n += kTileColumns) {
      const T* column[kTileColumns];  // the last tile repeats its last column
      for (int64_t i = 0; i < kTileColumns; ++i) column[i] = weight + (n + i < count ? n + i : count - 1) * stride;
      const Packed* x = packed_;
      for (int64_t m = 0; m < block.rows; m += kTileRows) {
        float* out = product + m * product_stride_ + n;
        switch (block.rows - m) {
          case 1: multiply_tile<T, 1>(x, column, args_.depth, out, product_stride_); break;
          case 2: multiply_tile<T, 2>(x, column, args_.depth, out, product_stride_); break;
          case 3: multiply_tile<T, 3>(x, column, args_.depth, out, product_stride_); break;
          default: multiply_tile<T, 4>(x, column, args_.depth, out, product_stride_);
        }
        x += kTileRows * steps_ * U::kStep;
      }
    }
  }

  void copy_columns(const T* weight, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < args_.depth; ++k)
      for (int64_t n = 0; n < count; ++n) columns_[n * args_.depth + k] = weight[n * stride + k * args_.depth_stride];
  }

  void store_product(const RowBlock& block, int64_t first, int64_t count) {
    for (int64_t m = 0; m < block.rows; ++m) {
      const float* product = product_ + m * product_stride_;
      T* out = static_cast<T*>(args_.out) + (block.first_row + m) * args_.columns + first;
      for_vectors(count, [&](int64_t j, int n) {
        store_part(out + j, rounded(product + j, block.expert, first + j, 1, n), n);
      });
    }
  }

  void store_gated(const RowBlock& block, int64_t first, int64_t count) {
    for (int64_t m = 0; m < block.rows; ++m) {
      const float* gate = product_ + m * product_stride_;
      const float* up = gate + args_.chunk;
      T* out = static_cast<T*>(args_.out) + (block.first_row + m) * args_.columns + first;
      for_vectors(count, [&](int64_t j, int n) {
        const int64_t column = args_.gate_step * (first + j);
        F32 g = rounded(gate + j, block.expert, column, args_.gate_step, n);
        F32 u = rounded(up + j, block.expert, column + args_.up_column, args_.gate_step, n);
        store_part(out + j, activate<T>(args_, g, u), n);
      });
    }
  }

  // n sums rounded to the storage type; a bias is added to the rounded value and the result rounded again.
  F32 rounded(const float* sums, int64_t expert, int64_t column, int64_t step, int n) {
    const F32 value = round_to<T>(load_part(sums, n));
    if (!args_.bias) return value;
    const T* bias = static_cast<const T*>(args_.bias) + expert * args_.bias_stride + column;
    F32 b{};
    for (int i = 0; i < n; ++i) b[i] = load1(bias + i * step);
    return round_to<T>(value + b);
  }

  template <typename F>
  static void for_vectors(int64_t count, F f) {
    for (int64_t j = 0; j < count; j += kLanes) f(j, count - j < kLanes ? int(count - j) : kLanes);
  }

  const GroupedGemmArgs& args_;
  const int64_t steps_;  // of kStep elements, along k
  const int64_t product_stride_;
  Packed* packed_;
  float* product_;
  T* columns_;  // copies of weight columns whose k is not dense
};

template <typename T, typename W>
void sum_rows(const WeightedSumArgs& args, int64_t begin, int64_t end) {
  const T* y = static_cast<const T*>(args.y);
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* rows = args.slots_to_rows + token * args.topk;
    const W* weights = static_cast<const W*>(args.weights) + token * args.topk;
    T* out = static_cast<T*>(args.out) + token * args.columns;
    for (int64_t j = 0; j < args.columns; j += kLanes) {
      const int n = args.columns - j < kLanes ? int(args.columns - j) : kLanes;
      F32 sum{};
      for (int64_t i = 0; i < args.topk; ++i) {
        if (rows[i] < 0) continue;
        const T* row = y + int64_t(rows[i]) * args.columns + j;
        sum = sum + load1(weights + i) * (n == kLanes ? load(row) : load_part(row, n));
      }
      n == kLanes ? store(out + j, sum) : store_part(out + j, sum, n);
    }
  }
}

template <typename T>
void sum_with_weights(const WeightedSumArgs& args, int64_t begin, int64_t end) {
  switch (args.weights_dtype) {
    case DType::f32: return sum_rows<T, float>(args, begin, end);
    case DType::bf16: return sum_rows<T, bf16>(args, begin, end);
    case DType::f16: return sum_rows<T, f16>(args, begin, end);
  }
}

}  // namespace

void grouped_gemm(const GroupedGemmArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return Worker<float>(args, begin).run_items();
    case DType::bf16: return Worker<bf16>(args, begin).run_items();
    case DType::f16: return Worker<f16>(args, begin).run_items();
  }
}

void weighted_sum(const WeightedSumArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return sum_with_weights<float>(args, begin, end);
    case DType::bf16: return sum_with_weights<bf16>(args, begin, end);
    case DType::f16: return sum_with_weights<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
