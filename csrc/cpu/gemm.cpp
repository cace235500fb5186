// Grouped products over the experts of a mixture.
//
// A thread takes one item after the other: a block of rows of one expert and a chunk of its weight's columns. The rows
// are packed once per block (they stay in the L2 cache), then each group of kTileColumns columns meets all of them
// while it is in the L1 cache. With few rows this is bound by reading the weights, with many by multiply-adds.

#include "gemm.h"

#include "gated.h"
#include "gemm_tile.h"
#include "transpose.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

static_assert(kColumnTile % kTileColumns == 0);

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T, typename Out>
class Worker {
  using U = Unit<T>;
  using Packed = typename U::Packed;

 public:
  Worker(const GroupedGemmArgs& args, int64_t index)
      : args_(args),
        steps_((args.depth + U::kStep - 1) / U::kStep),
        product_stride_((args.gated ? 2 : 1) * args.chunk) {
    char* scratch = static_cast<char*>(args.scratch) + index * args.scratch_bytes;
    packed_ = reinterpret_cast<Packed*>(scratch);
    product_ = reinterpret_cast<float*>(scratch += args.packed_bytes);
    bias_ = reinterpret_cast<float*>(scratch += args.product_bytes);
    copies_ = reinterpret_cast<T*>(scratch += args.bias_bytes);
  }

  void run_items() {
    const int64_t chunks = (args_.columns + args_.chunk - 1) / args_.chunk;
    const int64_t items = args_.block_count * chunks;
    const RowBlock* packed_block = nullptr;
    for (int64_t item; (item = __atomic_fetch_add(args_.next_item, 1, __ATOMIC_RELAXED)) < items;) {
      const RowBlock& block = args_.blocks[item / chunks];
      if (&block != packed_block) pack_rows(block);
      packed_block = &block;
      const int64_t first = (item % chunks) * args_.chunk;
      const int64_t count = min(args_.chunk, args_.columns - first);
      if (!args_.gated) {
        multiply(block, first, count, {}, 0);
        store_product(block, first, count);
      } else {
        if (args_.interleaved) {
          multiply(block, 2 * first, 2 * count, {}, 0);
        } else {
          const int64_t up = args_.columns + first;
          multiply(block, first, count, columns(block, up, count), 0);
          multiply(block, up, count, {}, args_.chunk);
        }
        switch (args_.form) {
          case Gated::silu: store_gated<Gated::silu>(block, first, count); break;
          case Gated::swish: store_gated<Gated::swish>(block, first, count); break;
          case Gated::gelu: store_gated<Gated::gelu>(block, first, count); break;
          case Gated::gelu_tanh: store_gated<Gated::gelu_tanh>(block, first, count); break;
        }
      }
    }
  }

 private:
  // Tiles of kTileRows rows one after the other; in a tile, kStep elements of each row in turn. Zeros fill the last
  // step.
  void pack_rows(const RowBlock& block) {
    Packed* out = packed_;
    for (int64_t tile = 0; tile < block.rows; tile += kTileRows) {
      const int64_t rows = min(kTileRows, block.rows - tile);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t row = block.first_row + tile + m;
        const T* x = static_cast<const T*>(args_.x) + (args_.x_rows ? args_.x_rows[row] : row) * args_.x_stride;
        for (int64_t step = 0; step < steps_; ++step) {
          const int64_t k = step * U::kStep;
          U::pack(x + k, int(min(U::kStep, args_.depth - k)), out + (step * rows + m) * U::kStep);
        }
      }
      out += rows * steps_ * U::kStep;
    }
  }

  Columns<T> columns(const RowBlock& block, int64_t first, int64_t count) const {
    const T* weight = static_cast<const T*>(args_.weight) + block.expert * args_.expert_stride;
    return {weight + first * args_.column_stride, args_.column_stride, count};
  }

  // The products of the packed rows with `count` columns from `first` on, into the columns from `to` on of the scratch;
  // likewise their biases. `next` is what will be multiplied after them, if known.
  void multiply(const RowBlock& block, int64_t first, int64_t count, Columns<T> next, int64_t to) {
    if (args_.bias) {
      const Out* bias = static_cast<const Out*>(args_.bias) + block.expert * args_.bias_stride + first;
      for_lanes(count, [&](int64_t n, int lanes) { store(bias_ + to + n, load(bias + n, lanes), lanes); });
    }
    Columns<T> weight = columns(block, first, count);
    if (args_.depth_stride != 1) {
      weight = copy_columns(weight);
      next = {};
    }
    // The tiles of rows share the work of prefetching the next columns.
    const int64_t tiles = (block.rows + kTileRows - 1) / kTileRows, share = (kTileColumns + tiles - 1) / tiles;
    for (int64_t n = 0; n < weight.count; n += kTileColumns) {
      const T* column[kTileColumns];  // the last tile repeats the last column
      for (int64_t i = 0; i < kTileColumns; ++i)
        column[i] = weight.first + min(n + i, weight.count - 1) * weight.stride;
      const Columns<T> rest = weight.from(n + kTileColumns);
      multiply_rows(block.rows, column, rest.count > 0 ? rest : next, share, product_ + to + n);
    }
  }

  void multiply_rows(int64_t rows, const T* const (&column)[kTileColumns], Columns<T> next, int64_t share, float* out) {
    int64_t left = min(next.count, kTileColumns);  // to prefetch
    const Packed* x = packed_;
    for (; rows > 0; rows -= kTileRows) {
      const Columns<T> ahead{next.first, next.stride, min(share, left)};
      switch (rows) {
        case 1: multiply_tile<T, 1>(x, column, args_.depth, ahead, out, product_stride_); break;
        case 2: multiply_tile<T, 2>(x, column, args_.depth, ahead, out, product_stride_); break;
        case 3: multiply_tile<T, 3>(x, column, args_.depth, ahead, out, product_stride_); break;
        default: multiply_tile<T, 4>(x, column, args_.depth, ahead, out, product_stride_);
      }
      next = next.from(ahead.count);
      left -= ahead.count;
      x += kTileRows * steps_ * U::kStep;
      out += kTileRows * product_stride_;
    }
  }

  // Copies of columns with dense k.
  Columns<T> copy_columns(Columns<T> weight) {
    auto copy = [&](int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end) {
      for (int64_t k = k_begin; k < k_end; ++k)
        for (int64_t n = n_begin; n < n_end; ++n)
          copies_[n * args_.copy_stride + k] = weight.first[n * weight.stride + k * args_.depth_stride];
    };
    constexpr int64_t kDepth = kTransposedDepth<T>;
    const int64_t blocks_n = weight.stride == 1 ? weight.count / kTransposed * kTransposed : 0;
    const int64_t blocks_k = args_.depth / kDepth * kDepth;
    for (int64_t k = 0; k < blocks_k; k += kDepth)
      for (int64_t n = 0; n < blocks_n; n += kTransposed)
        transpose_block(weight.first + k * args_.depth_stride + n, args_.depth_stride,
                        copies_ + n * args_.copy_stride + k, args_.copy_stride);
    copy(0, blocks_k, blocks_n, weight.count);
    copy(blocks_k, args_.depth, 0, weight.count);
    return {copies_, args_.copy_stride, weight.count};
  }

  void store_product(const RowBlock& block, int64_t first, int64_t count) {
    const F32 scale = splat(args_.scale);
    for (int64_t m = 0; m < block.rows; ++m) {
      const float* product = product_ + m * product_stride_;
      const int64_t row = block.first_row + m;
      Out* out = static_cast<Out*>(args_.out) + row * args_.out_stride + first;
      if (args_.round_sums) {
        for_lanes(count, [&](int64_t j, int n) { store(out + j, with_bias(product + j, bias_ + j), n); });
        continue;
      }
      const Out* addend =
          args_.addend ? static_cast<const Out*>(args_.addend) + row * args_.addend_stride + first : nullptr;
      for_lanes(count, [&](int64_t j, int n) {
        F32 value = load(product + j) * scale;
        if (args_.bias) value += load(bias_ + j);
        if (addend) value += load(addend + j, n);
        store(out + j, value, n);
      });
    }
  }

  template <Gated form>
  void store_gated(const RowBlock& block, int64_t first, int64_t count) {
    const Gating<T, form> gating(args_.limit, args_.alpha, args_.up_offset);
    for (int64_t m = 0; m < block.rows; ++m) {
      const float* product = product_ + m * product_stride_;
      T* out = static_cast<T*>(args_.out) + (block.first_row + m) * args_.out_stride + first;
      for_lanes(count, [&](int64_t j, int n) {
        if (args_.interleaved) {
          const F32 a = with_bias(product + 2 * j, bias_ + 2 * j);
          const F32 b = with_bias(product + 2 * j + kLanes, bias_ + 2 * j + kLanes);
          const F32 gate = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
          const F32 up = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
          store(out + j, gating(gate, up), n);
        } else {
          const int64_t u = args_.chunk + j;
          store(out + j, gating(with_bias(product + j, bias_ + j), with_bias(product + u, bias_ + u)), n);
        }
      });
    }
  }

  // Sums rounded to the storage type; a bias is added to the rounded value and the result rounded again. The scratch is
  // padded, so that whole vectors can be read at the end of a row.
  F32 with_bias(const float* sums, const float* bias) const {
    const F32 value = round_to<T>(load(sums));
    return args_.bias ? round_to<T>(value + load(bias)) : value;
  }

  const GroupedGemmArgs& args_;
  const int64_t steps_;  // of kStep elements, along k
  const int64_t product_stride_;
  Packed* packed_;
  float* product_;
  float* bias_;
  T* copies_;
};

}  // namespace

void grouped_gemm(const GroupedGemmArgs& args, int64_t begin, int64_t end) {
  const bool widened = args.out_dtype != args.dtype;
  switch (args.dtype) {
    case DType::f32: return Worker<float, float>(args, begin).run_items();
    case DType::bf16:
      return widened ? Worker<bf16, float>(args, begin).run_items() : Worker<bf16, bf16>(args, begin).run_items();
    case DType::f16:
      return widened ? Worker<f16, float>(args, begin).run_items() : Worker<f16, f16>(args, begin).run_items();
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
