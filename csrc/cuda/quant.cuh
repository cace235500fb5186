// Quantisation and its inverse. All of it is bound by memory: the values once, the codes once.
//
// quantize_rows: some threads hold a group in registers, find its largest magnitude by shuffles, and write its codes;
// groups longer than a warp can hold have a CUDA block. quantize_blocks: the same for tiles of several rows, each of
// one block, of narrow blocks beside each other, or of columns with a scale each; threads exchange their largest
// magnitudes by shuffles and through shared memory. The other kernels know the scales before.
#pragma once

#include "device.cuh"
#include "quant_config.h"
#include "quantizer.cuh"

namespace deepinfer {

template <QuantizeRowsConfig c>
DEVICE void quantize_rows(const QuantizeArgs& args) {
  using T = Element<c.x>;
  using Index = IndexOf<c.longer>;
  using Place = GroupPlace<c.lanes, c.groups, c.rows, Index>;
  constexpr int n = kVectorBytes / sizeof(T), step = c.lanes * n;
  __shared__ float scratch[32];
  const Blocks& b = args.blocks;
  Place at[c.items];
  const T* x[c.items];
#pragma unroll
  for (int item = 0; item < c.items; ++item) {
    at[item] = Place(b.matrices.count, b.columns, b.block_columns, b.across, n, blockIdx.x * c.items + item);
    x[item] = static_cast<const T*>(args.x) + row_offset<c.strided>(b.matrices, at[item].row) + at[item].begin;
  }
  wait_for_previous_kernel();

  // All loads first, so that they are under way together.
  Vec<T, n> held[c.items][c.vectors];
#pragma unroll
  for (int item = 0; item < c.items; ++item)
#pragma unroll
    for (int k = 0; k < c.vectors; ++k)
      held[item][k] = load_vector<c.access, n>(x[item], at[item].first + k * step, at[item].size);
  let_next_kernel_start();

#pragma unroll
  for (int item = 0; item < c.items; ++item) {
    const Place& place = at[item];
    float amax = 0.f;
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) amax = max_or_nan(amax, largest_magnitude(held[item][k]));
    if constexpr (c.longer)
      for (Index i = place.first + c.vectors * step; i < place.size; i += step)
        amax = max_or_nan(amax, largest_magnitude(load_vector<c.access, n>(x[item], i, place.size)));
    const GroupScale scale = scale_of<c.code, c.scale>(max_over<c.lanes>(amax, scratch));
    if (!place.active) continue;
    if (threadIdx.x % c.lanes == 0)
      store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, place.row), place.index, scale.stored);
    if (!args.codes) continue;

    uint8_t* codes = static_cast<uint8_t*>(args.codes) + code_bytes<c.code>(place.row * b.columns + place.begin);
    auto write = [&](const Vec<T, n>& v, Index i) {
      store_codes<c.code, c.access, n>(codes, i, place.size, scaled_codes<c.code>(v, scale));
    };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[item][k], place.first + k * step);
    if constexpr (c.longer)
      for (Index i = place.first + c.vectors * step; i < place.size; i += step)
        write(load_vector<c.access, n>(x[item], i, place.size), i);
  }
}

// ---- blocks of several rows ----

// What some threads work on: rows and columns of a matrix, and the band and first block of its scales.
template <QuantizeBlocksConfig c>
struct Tile {
  static constexpr int n = kVectorBytes / sizeof(Element<c.x>);

  uint32_t band, matrix;
  int64_t first_block, blocks;
  int64_t row, column, rows, end;  // columns [column, end)

  DEVICE explicit Tile(const Blocks& b) {
    constexpr int width = c.lanes * n;
    const uint32_t strips = uint32_t(c.beside == 1 ? b.across : (b.columns + width - 1) / width);
    const uint32_t index = blockIdx.x * c.tiles + threadIdx.x / c.threads, strip = index % strips;
    band = index / strips;
    matrix = band / uint32_t(b.down);
    row = int64_t(band - matrix * uint32_t(b.down)) * b.block_rows;
    first_block = strip * int64_t(c.beside ? c.beside : width);
    blocks = b.across - first_block;
    const int64_t wanted = c.beside == 1 ? b.block_columns : width;
    column = strip * wanted;
    const int64_t below = b.rows - row, left = b.columns - column;
    rows = matrix >= b.matrices.count ? 0 : below < b.block_rows ? below : b.block_rows;
    end = column + (left < wanted ? left : wanted);
  }
};

// The largest magnitude of each of a thread's n columns, over the threads of the tile that share them, becomes the
// factors of these columns; 0 for a column with NaN or infinity.
template <QuantizeBlocksConfig c, int n>
DEVICE Vec<float, n> scale_columns(const QuantizeArgs& args, const Tile<c>& t, Vec<float, n> amax) {
  constexpr int width = c.lanes * n, warps = c.threads / 32;
  static_assert(c.lanes <= 32 && 32 % c.lanes == 0);
  __shared__ __align__(16) float most[warps][width];
  __shared__ __align__(16) float factors[width];
  const int lane = threadIdx.x % c.lanes * n;
#pragma unroll
  for (int step = c.lanes; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < n; ++i)
      amax.at[i] = max_or_nan(amax.at[i], __shfl_xor_sync(0xffffffff, amax.at[i], step, 32));
  if (threadIdx.x % 32 < c.lanes) *reinterpret_cast<Vec<float, n>*>(&most[threadIdx.x / 32][lane]) = amax;
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < width; i += c.threads) {
    float largest = 0.f;
#pragma unroll
    for (int w = 0; w < warps; ++w) largest = max_or_nan(largest, most[w][i]);
    const GroupScale scale = scale_of<c.code, c.scale>(largest);
    factors[i] = scale.factor;
    if (t.column + i < t.end)
      store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, t.band), t.column + i, scale.stored);
  }
  __syncthreads();
  return *reinterpret_cast<Vec<float, n>*>(&factors[lane]);
}

// The largest magnitude over the threads of a tile that share a block, in every one of them.
template <QuantizeBlocksConfig c>
DEVICE float max_over_block(float x) {
  constexpr int warps = c.threads / 32;
  if constexpr (c.beside == 1) {
    __shared__ float scratch[32];
    return max_over<c.threads>(x, scratch);
  } else {
    constexpr int lanes = c.lanes / c.beside;
    static_assert(lanes * c.beside == c.lanes && 32 % c.lanes == 0);
    __shared__ float scratch[warps][c.beside];
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      if (step < lanes || step >= c.lanes) x = max_or_nan(x, __shfl_xor_sync(0xffffffff, x, step, 32));
    if constexpr (warps > 1) {
      const int block = threadIdx.x % c.lanes / lanes;
      scratch[threadIdx.x / 32][block] = x;  // the same from several threads
      __syncthreads();
#pragma unroll
      for (int w = 0; w < warps; ++w) x = max_or_nan(x, scratch[w][block]);
    }
    return x;
  }
}

template <QuantizeBlocksConfig c>
DEVICE void quantize_blocks(const QuantizeArgs& args) {
  using T = Element<c.x>;
  constexpr int n = kVectorBytes / sizeof(T);
  const Blocks& b = args.blocks;
  const Tile<c> t(b);
  const int thread = threadIdx.x % c.threads;
  const T* x = static_cast<const T*>(args.x) + row_offset<true>(b.matrices, t.matrix) + t.row * b.row_stride;
  wait_for_previous_kernel();

  auto load = [&](int64_t piece) {
    const int64_t row = piece / c.lanes;
    return load_vector<c.access, n>(x + row * b.row_stride, t.column + piece % c.lanes * n,
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
      store_codes<c.code, c.access, n>(codes + row * code_bytes<c.code>(b.columns), t.column + piece % c.lanes * n,
                                       t.end, v);
  };
  const int64_t pieces = t.rows * c.lanes;

  if constexpr (c.beside == 0) {
    ColumnMagnitudes<T, n> amax;
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) amax.add(held[k]);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads) amax.add(load(piece));
    const Vec<float, n> factor = scale_columns<c, n>(args, t, amax.get());
    if (!args.codes) return;
    auto write = [&](const Vec<T, n>& v, int64_t piece) {
      const float nan = c.code == Code::e4m3 ? __uint_as_float(0x7fffffff) : 0.f;
      float scaled[n];
#pragma unroll
      for (int i = 0; i < n; ++i) scaled[i] = factor.at[i] == 0.f ? nan : to_float(v.at[i]) * factor.at[i];
      store(piece, to_codes<c.code, n>(scaled));
    };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[k], thread + k * c.threads);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads)
        write(load(piece), piece);
  } else {
    float amax = 0.f;
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) amax = max_or_nan(amax, largest_magnitude(held[k]));
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads)
        amax = max_or_nan(amax, largest_magnitude(load(piece)));
    const GroupScale scale = scale_of<c.code, c.scale>(max_over_block<c>(amax));
    constexpr int lanes = c.lanes / c.beside;
    const int block = c.beside == 1 ? thread : thread / lanes;
    if (t.rows > 0 && block < c.beside && block < t.blocks && (c.beside == 1 || thread % lanes == 0))
      store_scale<c.scale>(args.scales, band_offset<c.scale>(args.scales, t.band), t.first_block + block, scale.stored);
    if (!args.codes) return;
    auto write = [&](const Vec<T, n>& v, int64_t piece) { store(piece, scaled_codes<c.code>(v, scale)); };
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[k], thread + k * c.threads);
    if constexpr (c.longer)
      for (int64_t piece = thread + c.vectors * c.threads; piece < pieces; piece += c.threads)
        write(load(piece), piece);
  }
}

// ---- scales that are given ----

// Where a thread works: `vectors` pieces of a row, or, if columns have scales of their own, that many rows of a piece.
template <ScalingConfig c>
struct ScalingPlace {
  static constexpr int n = kVectorBytes / sizeof(Element<c.dtype>), step = c.lanes * n, below = c.down ? c.vectors : 1;
  int64_t row, strided, row_stride, rows, band_at, first, columns;

  DEVICE ScalingPlace(const Blocks& b, const Scales& scales) {
    constexpr int run = c.down ? step : c.vectors * step;
    const uint32_t runs = uint32_t((b.columns + run - 1) / run), pieces = uint32_t((b.rows + below - 1) / below);
    const uint32_t piece = blockIdx.x / runs * c.rows + threadIdx.x / c.lanes;
    const uint32_t matrix = piece / pieces, in_matrix = (piece - matrix * pieces) * below;
    first = int64_t(blockIdx.x % runs) * run + threadIdx.x % c.lanes * n;
    row = matrix * b.rows + in_matrix;
    rows = matrix < b.matrices.count ? b.rows - in_matrix : 0;
    columns = b.columns;
    row_stride = b.row_stride;
    strided = row_offset<true>(b.matrices, matrix) + in_matrix * b.row_stride;
    band_at = band_offset<c.scale>(scales, matrix * b.down + in_matrix / uint32_t(b.block_rows));
  }

  // Of piece k.
  DEVICE int64_t column(int k) const { return c.down ? first : first + k * step; }
  DEVICE int64_t end(int k) const { return (c.down ? k : 0) < rows ? columns : 0; }
  DEVICE int64_t strided_row(int k) const { return strided + (c.down ? k * row_stride : 0); }
  DEVICE int64_t dense_row(int k) const { return (row + (c.down ? k : 0)) * columns; }

  // Nothing is read past the end.
  DEVICE void load_scales(const Scales& scales, int k, float (&scale)[n]) const {
    constexpr bool one = c.block_columns == 0 || c.block_columns % n == 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int64_t at = column(k) + i;
      if (one && i > 0) scale[i] = scale[0];
      else if (at < end(k)) scale[i] = load_scale<c.scale>(scales, band_at, c.block_columns ? at / c.block_columns : 0);
      else scale[i] = 0.f;
    }
  }
};

template <ScalingConfig c>
DEVICE void dequantize(const DequantizeArgs& args) {
  using T = Element<c.dtype>;
  using Place = ScalingPlace<c>;
  constexpr int n = Place::n, bytes = code_bytes<c.code>(n);
  const Place place(args.blocks, args.scales);
  const auto* codes = static_cast<const uint8_t*>(args.codes);
  auto* out = static_cast<T*>(args.out);
  wait_for_previous_kernel();

  Vec<uint8_t, bytes> held[c.vectors];
  float scales[c.vectors][n];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    held[k] = load_vector<code_bytes<c.code>(c.access), bytes>(
        codes + place.strided_row(k), code_bytes<c.code>(place.column(k)), code_bytes<c.code>(place.end(k)));
#pragma unroll
  for (int k = 0; k < (c.down ? 1 : c.vectors); ++k) place.load_scales(args.scales, k, scales[k]);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    float values[n];
    from_codes<c.code, n>(held[k], values);
    Vec<T, n> y;
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = from_float<T>(values[i] * scales[c.down ? 0 : k][i]);
    store_vector<c.access, n>(out + place.dense_row(k), place.column(k), place.end(k), y);
  }
}

template <ScalingConfig c>
DEVICE void quantize_with_scales(const QuantizeArgs& args) {
  using T = Element<c.dtype>;
  using Place = ScalingPlace<c>;
  constexpr int n = Place::n;
  const Place place(args.blocks, args.scales);
  const T* x = static_cast<const T*>(args.x);
  auto* codes = static_cast<uint8_t*>(args.codes);
  wait_for_previous_kernel();

  Vec<T, n> held[c.vectors];
  float scales[c.vectors][n];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    held[k] = load_vector<c.access, n>(x + place.strided_row(k), place.column(k), place.end(k));
#pragma unroll
  for (int k = 0; k < (c.down ? 1 : c.vectors); ++k) place.load_scales(args.scales, k, scales[k]);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    float values[n];
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = to_float(held[k].at[i]) * (1.f / scales[c.down ? 0 : k][i]);
    store_codes<c.code, c.access, n>(codes + code_bytes<c.code>(place.dense_row(k)), place.column(k), place.end(k),
                                     to_codes_saturating<c.code, n>(values));
  }
}

}  // namespace deepinfer
