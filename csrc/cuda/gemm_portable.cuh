// Matrix products without the matrix unit: for float32, and for the chips whose matrix unit gemm.cuh does not know. Any
// strides. A block holds 64 x 64 sums, 16 a thread, and brings 16 of k at a time into shared memory. Bound by
// multiply-adds.
#pragma once

#include "gemm_tiles.cuh"

namespace deepinfer {

template <Operand> struct OperandElement;
template <> struct OperandElement<Operand::f32> { using type = float; };
template <> struct OperandElement<Operand::bf16> { using type = bf16; };
template <> struct OperandElement<Operand::f16> { using type = f16; };

struct e4m3 { uint8_t bits; };
template <> struct OperandElement<Operand::e4m3> { using type = e4m3; };

// Exact. Exponent and mantissa, put where those of a float are, are too small by 2^120; that makes subnormals right
// too.
DEVICE float to_float(e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f, sign = uint32_t(x.bits & 0x80) << 24;
  if (magnitude == 0x7f) return __uint_as_float(0x7fffffff);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f));
}

constexpr int kPortableTile = 64, kPortableDepth = 16, kPortableThreads = 256, kPortablePitch = kPortableTile + 4;

// Rows [first, end) and k from `k` on, as floats in shared memory, k by k; zeros outside. Neighbouring threads read
// along the dense dimension.
template <typename T>
DEVICE void load_slab(float (&to)[kPortableDepth][kPortablePitch], const T* from, int first, int end, int64_t k,
                      int64_t depth, int64_t stride, int64_t depth_stride) {
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPortableTile * kPortableDepth; i += kPortableThreads) {
    const int at = i + thread;
    const int row = depth_stride == 1 ? at / kPortableDepth : at % kPortableTile;
    const int step = depth_stride == 1 ? at % kPortableDepth : at / kPortableTile;
    const bool inside = first + row < end && k + step < depth;
    to[step][row] = inside ? to_float(from[(first + row) * stride + (k + step) * depth_stride]) : 0.f;
  }
}

// Of the product of a row and a column over a block of k; anything outside of the result.
template <GemmConfig c>
DEVICE float scale_of(const MatmulArgs& args, const GemmTile& tile, int m, int n, int64_t block) {
  if (m >= tile.end || n >= args.columns) return 0.f;
  const float* weight_scale = args.weight_scale + tile.expert * args.scale_expert_stride +
                              (c.column_scales ? n : n / 128) * args.scale_column_stride;
  return args.x_scale[m + block * args.x_scale_depth_stride] * weight_scale[block * args.scale_depth_stride];
}

template <GemmConfig c>
DEVICE void gemm_portable(const MatmulArgs& args) {
  static_assert(c.tile_n == kPortableTile && c.tile_m == kPortableTile);
  using T = typename OperandElement<c.type>::type;
  using Out = Element<c.out>;
  __shared__ float x[kPortableDepth][kPortablePitch], weight[kPortableDepth][kPortablePitch];
  const int first_m = threadIdx.x / 16 * 4, first_n = threadIdx.x % 16 * 4;
  wait_for_previous_kernel();
  let_next_kernel_start();
  GemmTiles<c> tiles;
  tiles.prepare(args);
  for (int t = tiles.first(); t < tiles.count; t += tiles.step()) {
    const GemmTile tile = tiles.at(t, 0);
    const T* expert = static_cast<const T*>(args.weight) + tile.expert * args.expert_stride;
    const T* tokens = static_cast<const T*>(args.x);
    int64_t first_k = 0, depth = args.depth;
    if constexpr (c.groups == RowGroups::batch) tokens += tile.expert * args.x_batch_stride;
    if constexpr (c.groups == RowGroups::depth) {
      first_k = tile.k;
      depth = tile.k_end;
    }
    const int64_t apart = GemmTiles<c>::apart ? tile.expert * args.out_batch_stride : 0;
    float total[4][4] = {};
    for (int64_t k = first_k; k < depth; k += kPortableDepth) {
      load_slab(x, tokens, tile.m, tile.end, k, depth, args.x_stride, args.x_depth_stride);
      load_slab(weight, expert, tile.n, int(args.columns), k, depth, args.column_stride, args.depth_stride);
      __syncthreads();
      float sum[4][4] = {};  // of a few terms, so that a long sum of sums loses little
#pragma unroll
      for (int step = 0; step < kPortableDepth; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(x[step][first_m + i], weight[step][first_n + j], sum[i][j]);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (c.type == Operand::e4m3)
            sum[i][j] *= scale_of<c>(args, tile, tile.m + first_m + i, tile.n + first_n + j, k / 128);
          total[i][j] += sum[i][j];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = tile.m + first_m + i, n = tile.n + first_n + j;
        if (m >= tile.end || n >= args.columns) continue;
        float value = finish<c>(total[i][j], args.scale, load_bias<c>(args, tile.expert, n));
        if constexpr (c.addend)
          value += to_float(static_cast<const Out*>(args.addend)[apart + m * args.addend_stride + n]);
        static_cast<Out*>(args.out)[apart + m * args.out_stride + n] = from_float<Out>(value);
      }
  }
  if constexpr (GemmTiles<c>::counted) {
    if (args.fill) tiles.fill_other_rows(args);
  }
}

}  // namespace deepinfer
