// Quantisation and its inverse. All of it is bound by memory: the values once, the codes once.
//
// quantize_rows: some threads hold a group in registers, find its largest magnitude by shuffles, and write its codes;
// groups longer than a warp can hold have a block. quantize_blocks: the same for blocks of several rows, by a warp or by
// a CUDA block. With a scale for each column, a strip of columns: each thread has a few rows of 16 bytes of it, and the
// threads exchange their largest magnitudes through shared memory. The others know the scales before.
#pragma once

#include "device.cuh"
#include "quant_config.h"
#include "quantizer.cuh"

namespace deepinfer {

template <QuantizeRowsConfig c>
DEVICE void quantize_rows(const QuantizeArgs& args) {
  using T = Element<c.x>;
  constexpr int n = kVectorBytes / sizeof(T), step = c.lanes * n;
  __shared__ float scratch[32];
  const Blocks& b = args.blocks;
  const GroupPlace<c.lanes, c.groups, c.rows> at(b.matrices.count, b.columns, b.block_columns, b.across, n);
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(b.matrices, at.row);
  wait_for_previous_kernel();

  Vec<T, n> held[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = load_vector<Reuse::once, c.access, n>(x, at.first + k * step, at.end);
  let_next_kernel_start();
  float amax = 0.f;
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) amax = max_or_nan(amax, largest_magnitude(held[k]));
  if constexpr (c.longer)
    for (int64_t i = at.first + c.vectors * step; i < at.end; i += step)
      amax = max_or_nan(amax, largest_magnitude(load_vector<Reuse::often, c.access, n>(x, i, at.end)));
  const GroupScale scale = scale_of<c.code, c.scale>(max_over<c.lanes>(amax, scratch));
  if (!at.active) return;
  if (threadIdx.x % c.lanes == 0)
    store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, at.row), at.index, scale.stored);
  if (!args.codes) return;

  uint8_t* codes = static_cast<uint8_t*>(args.codes) + at.row * code_bytes<c.code>(b.columns);
  auto write = [&](const Vec<T, n>& v, int64_t i) {
    store_codes<c.code, c.access, n>(codes, i, at.end, scaled_codes<c.code>(v, scale));
  };
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) write(held[k], at.first + k * step);
  if constexpr (c.longer)
    for (int64_t i = at.first + c.vectors * step; i < at.end; i += step)
      write(load_vector<Reuse::once, c.access, n>(x, i, at.end), i);
}

// ---- blocks of several rows ----

// What a group of threads works on: rows and columns of a matrix, and the band and first column of its scales.
struct Tile {
  bool active;
  uint32_t band;
  int64_t first_scale;
  int64_t row, column, rows, end;  // columns [column, end)
  int64_t matrix;
};

template <QuantizeBlocksConfig c>
DEVICE Tile tile_of(const Blocks& b) {
  constexpr int width = c.lanes * (kVectorBytes / sizeof(Element<c.x>));
  const uint32_t strips = uint32_t(c.columns ? (b.columns + width - 1) / width : b.across);
  const uint32_t index = blockIdx.x * c.blocks + threadIdx.x / c.threads;
  Tile t;
  t.band = index / strips;
  const uint32_t matrix = t.band / uint32_t(b.down), strip = index % strips;
  t.matrix = matrix;
  t.active = matrix < b.matrices.count;
  t.row = int64_t(t.band - matrix * uint32_t(b.down)) * b.block_rows;
  const int64_t wanted = c.columns ? width : b.block_columns;
  t.column = strip * wanted;
  t.first_scale = c.columns ? t.column : strip;
  const int64_t rows = b.rows - t.row, columns = b.columns - t.column;
  t.rows = !t.active ? 0 : rows < b.block_rows ? rows : b.block_rows;
  t.end = t.column + (columns < wanted ? columns : wanted);
  return t;
}

// The largest magnitude of each of a thread's n columns, over the threads of the block that share them, becomes the
// factors of these columns; 0 for a column with NaN or infinity.
template <QuantizeBlocksConfig c, int n>
DEVICE void scale_columns(const QuantizeArgs& args, const Tile& t, float (&amax)[n], float (&factor)[n]) {
  constexpr int width = c.lanes * n, warps = c.threads / 32;
  static_assert(c.lanes <= 32 && 32 % c.lanes == 0 && width <= c.threads);
  __shared__ float most[warps][width];
  __shared__ __align__(16) float factors[width];
  const int lane = threadIdx.x % c.lanes * n;
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int step = c.lanes; step < 32; step *= 2)
      amax[i] = max_or_nan(amax[i], __shfl_xor_sync(0xffffffff, amax[i], step, 32));
    if (threadIdx.x % 32 < c.lanes) most[threadIdx.x / 32][lane + i] = amax[i];
  }
  __syncthreads();
  if (threadIdx.x < width) {
    float largest = 0.f;
#pragma unroll
    for (int w = 0; w < warps; ++w) largest = max_or_nan(largest, most[w][threadIdx.x]);
    const GroupScale scale = scale_of<c.code, c.scale>(largest);
    factors[threadIdx.x] = scale.factor;
    const int64_t column = t.column + threadIdx.x;
    if (column < t.end)
      store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, t.band), column, scale.stored);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) factor[i] = factors[lane + i];
}

template <QuantizeBlocksConfig c>
DEVICE void quantize_blocks(const QuantizeArgs& args) {
  using T = Element<c.x>;
  constexpr int n = kVectorBytes / sizeof(T);
  __shared__ float scratch[32];
  const Blocks& b = args.blocks;
  const Tile t = tile_of<c>(b);
  const int thread = threadIdx.x % c.threads;
  const T* x = static_cast<const T*>(args.x) + row_offset<true>(b.matrices, t.matrix) + t.row * b.row_stride;
  wait_for_previous_kernel();

  auto load = [&](int64_t piece) {
    const int64_t row = piece / c.lanes;
    return load_vector<Reuse::once, c.access, n>(x + row * b.row_stride, t.column + piece % c.lanes * n,
                                                 row < t.rows ? t.end : 0);
  };
  Vec<T, n> held[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = load(thread + k * c.threads);
  let_next_kernel_start();

  uint8_t* codes = static_cast<uint8_t*>(args.codes) + (t.matrix * b.rows + t.row) * code_bytes<c.code>(b.columns);
  auto store = [&](int64_t piece, const Codes<c.code, n>& v) {
    const int64_t row = piece / c.lanes;
    if (row < t.rows)
      store_codes<c.code, c.access, n>(codes + row * code_bytes<c.code>(b.columns), t.column + piece % c.lanes * n, t.end,
                                       v);
  };
  const int64_t pieces = t.rows * c.lanes;

  if constexpr (c.columns) {
    float amax[n] = {}, factor[n];
    auto compare = [&](const Vec<T, n>& v) {
#pragma unroll
      for (int i = 0; i < n; ++i) amax[i] = max_or_nan(amax[i], fabsf(to_float(v.at[i])));
    };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) compare(held[k]);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads) compare(load(piece));
    scale_columns<c, n>(args, t, amax, factor);
    if (!args.codes) return;
    auto write = [&](const Vec<T, n>& v, int64_t piece) {
      const float nan = c.code == Code::e4m3 ? __uint_as_float(0x7fffffff) : 0.f;
      float scaled[n];
#pragma unroll
      for (int i = 0; i < n; ++i) scaled[i] = factor[i] == 0.f ? nan : to_float(v.at[i]) * factor[i];
      store(piece, to_codes<c.code, n>(scaled));
    };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[k], thread + k * c.threads);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads) write(load(piece), piece);
  } else {
    float amax = 0.f;
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) amax = max_or_nan(amax, largest_magnitude(held[k]));
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads)
        amax = max_or_nan(amax, largest_magnitude(load(piece)));
    const GroupScale scale = scale_of<c.code, c.scale>(max_over<c.threads>(amax, scratch));
    if (!t.active) return;
    if (thread == 0)
      store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, t.band), t.first_scale, scale.stored);
    if (!args.codes) return;
    auto write = [&](const Vec<T, n>& v, int64_t piece) { store(piece, scaled_codes<c.code>(v, scale)); };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[k], thread + k * c.threads);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads) write(load(piece), piece);
  }
}

// ---- scales that are given ----

// Where a thread works: a row, and from which of its elements on.
template <ScalingConfig c>
struct ScalingPlace {
  static constexpr int n = kVectorBytes / sizeof(Element<c.dtype>), step = c.lanes * n;
  int64_t row, strided, band_at, first;
  bool active;

  DEVICE ScalingPlace(const Blocks& b, const Scales& scales) {
    constexpr int run = c.vectors * step;
    const uint32_t runs = uint32_t((b.columns + run - 1) / run);
    row = int64_t(blockIdx.x / runs) * c.rows + threadIdx.x / c.lanes;
    first = int64_t(blockIdx.x % runs) * run + threadIdx.x % c.lanes * n;
    int64_t matrix = row, in_matrix = 0, band = row;
    if (b.rows > 1) {
      matrix = row / b.rows;
      in_matrix = row % b.rows;
      band = matrix * b.down + in_matrix / b.block_rows;
    }
    active = matrix < b.matrices.count;
    strided = row_offset<true>(b.matrices, matrix) + in_matrix * b.row_stride;
    band_at = band_offset<c.scale>(scales, band);
  }

  // The scales of n elements; nothing is read past `size`.
  DEVICE void load_scales(const Scales& scales, int64_t at, int64_t size, float (&scale)[n]) const {
    constexpr bool one = c.block_columns == 0 || c.block_columns % n == 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (one && i > 0) scale[i] = scale[0];
      else if (at + i < size) scale[i] = load_scale<c.scale>(scales, band_at, c.block_columns ? (at + i) / c.block_columns : 0);
      else scale[i] = 0.f;
    }
  }
};

template <ScalingConfig c>
DEVICE void dequantize(const DequantizeArgs& args) {
  using T = Element<c.dtype>;
  using Place = ScalingPlace<c>;
  constexpr int n = Place::n, bytes = code_bytes<c.code>(n);
  const int64_t size = args.blocks.columns;
  const Place place(args.blocks, args.scales);
  if (!place.active) return;
  const uint8_t* codes = static_cast<const uint8_t*>(args.codes) + place.strided;
  T* out = static_cast<T*>(args.out) + place.row * size;
  wait_for_previous_kernel();

  Vec<uint8_t, bytes> held[c.vectors];
  float scales[c.vectors][n];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    const int64_t i = place.first + k * Place::step;
    held[k] = load_vector<Reuse::once, code_bytes<c.code>(c.access), bytes>(codes, code_bytes<c.code>(i),
                                                                            code_bytes<c.code>(size));
  }
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    place.load_scales(args.scales, place.first + k * Place::step, size, scales[k]);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    float values[n];
    from_codes<c.code, n>(held[k], values);
    Vec<T, n> y;
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = from_float<T>(values[i] * scales[k][i]);
    store_vector<c.access, n>(out, place.first + k * Place::step, size, y);
  }
}

template <ScalingConfig c>
DEVICE void quantize_with_scales(const QuantizeArgs& args) {
  using T = Element<c.dtype>;
  using Place = ScalingPlace<c>;
  constexpr int n = Place::n;
  const int64_t size = args.blocks.columns;
  const Place place(args.blocks, args.scales);
  if (!place.active) return;
  const T* x = static_cast<const T*>(args.x) + place.strided;
  uint8_t* codes = static_cast<uint8_t*>(args.codes) + place.row * code_bytes<c.code>(size);
  wait_for_previous_kernel();

  Vec<T, n> held[c.vectors];
  float scales[c.vectors][n];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    held[k] = load_vector<Reuse::once, c.access, n>(x, place.first + k * Place::step, size);
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    place.load_scales(args.scales, place.first + k * Place::step, size, scales[k]);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    float values[n];
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = to_float(held[k].at[i]) * (1.f / scales[k][i]);
    store_codes<c.code, c.access, n>(codes, place.first + k * Place::step, size, to_codes_saturating<c.code, n>(values));
  }
}

}  // namespace deepinfer
