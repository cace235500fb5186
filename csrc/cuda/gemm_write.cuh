// From the sums in registers to the result, through shared memory.
#pragma once

#include "gemm_ring.cuh"

namespace deepinfer {

// n finished values, the last steps and the store.
template <GemmConfig c, int n>
DEVICE void write(const MatmulArgs& problem, int expert, int64_t row, int column, const float (&values)[n]) {
  using Out = Element<c.out>;
  constexpr int access = c.access < n ? c.access : n;
  const int64_t apart = GemmTiles<c>::apart ? expert * problem.out_batch_stride : 0;
  Out* out = static_cast<Out*>(problem.out) + apart + row * problem.out_stride;
  Vec<Out, n> rounded{};
  if constexpr (c.addend) {
    const Out* addend = static_cast<const Out*>(problem.addend) + apart + row * problem.addend_stride;
    const Vec<Out, n> added = load_vector<access, n>(addend, column, problem.columns);
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i] + to_float(added.at[i]));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i]);
  }
  store_vector<access, n>(out, column, problem.columns, rounded);
}

DEVICE uint32_t pack(bf16 low, bf16 high) { return uint32_t(high.bits) << 16 | low.bits; }
DEVICE uint32_t pack(f16 low, f16 high) { return uint32_t(high.bits) << 16 | low.bits; }

// Where the staged element (token, column) lies: whole pieces of 16 or 32 bytes change places, so that neither those
// who write columns nor those who read rows meet in a bank.
template <typename Staged>
DEVICE Staged* staged(char* buffer, int token, int column) {
  constexpr bool narrow = sizeof(Staged) == 2;
  const int flip = narrow ? token % 8 : token / 2 % 4;
  return reinterpret_cast<Staged*>(buffer) + token * 64 + (column ^ flip * 8);
}

// Four matrices of 8 x 8 at once. `to`: where this lane's row of its matrix goes, lanes 8 i to 8 i + 7 for matrix i.
template <bool transposed>
DEVICE void store_matrices(const void* to, const uint32_t (&words)[4]) {
  if constexpr (transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// What a warpgroup writes at once: 64 columns, or what is left of a tile whose tokens are rows of the matrix unit.
struct GemmChunk {
  int expert, row, column;
  int rows;  // that may be written, at least 1
};

// From the registers (see multiply()) of a warpgroup into shared memory, 16 columns of the matrix unit at a time.
template <GemmConfig c, int columns>
DEVICE void stage_chunk(const float* sums, const MatmulArgs& problem, const GemmChunk& chunk, char* buffer) {
  using Shape = GemmShape<c>;
  using Staged = typename Shape::Staged;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float bias[2] = {};  // of the columns, where they are the rows of the matrix unit
  if constexpr (!c.tokens_as_rows)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bias[i] = load_bias<c>(problem, chunk.expert, chunk.column + warp * 16 + lane / 4 + i * 8);
#pragma unroll
  for (int at = 0; at < (c.tokens_as_rows ? columns : Shape::chunk); at += 16) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float b = bias[i / 2 % 2];
      if constexpr (c.tokens_as_rows)
        b = load_bias<c>(problem, chunk.expert, chunk.column + at + i / 4 * 8 + lane % 4 * 2 + i % 2);
      v[i] = finish<c>(sums[at / 2 + i], problem.scale, b);
    }
    if constexpr (sizeof(Staged) == 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack(from_float<Staged>(v[2 * i]), from_float<Staged>(v[2 * i + 1]));
      const int matrix = lane / 8, row = warp * 16 + matrix % 2 * 8, across = at + matrix / 2 * 8;
      if constexpr (c.tokens_as_rows)
        store_matrices<false>(staged<Staged>(buffer, row + lane % 8, across), words);
      else
        store_matrices<true>(staged<Staged>(buffer, across + lane % 8, row), words);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, across = at + i / 4 * 8 + lane % 4 * 2 + i % 2;
        *staged<float>(buffer, c.tokens_as_rows ? row : across, c.tokens_as_rows ? across : row) = v[i];
      }
    }
  }
}

// A staged chunk, by the threads of a warpgroup.
template <GemmConfig c, int columns>
DEVICE void copy_chunk(const MatmulArgs& problem, const GemmChunk& chunk, char* buffer) {
  using Staged = typename GemmShape<c>::Staged;
  constexpr int n = kVectorBytes / sizeof(typename GemmShape<c>::Out), pieces = columns / n;
#pragma unroll
  for (int i = threadIdx.x % 128; i < GemmShape<c>::chunk * pieces; i += 128) {
    const int token = i / pieces, at = i % pieces * n;
    if (token >= chunk.rows) break;
    const Staged* from = staged<Staged>(buffer, token, at);
    float values[n];
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = to_float(from[j]);
    write<c>(problem, chunk.expert, chunk.row + token, chunk.column + at, values);
  }
}

// Buffers in turn, with one barrier a chunk: whoever passes it has read what he copied himself from the buffer that
// comes next, and the copy engine has read it too.
template <GemmConfig c, int columns>
DEVICE void write_chunk(const float* sums, const GemmKernelArgs& args, const GemmChunk& chunk, char* stage, int& turn) {
  using Shape = GemmShape<c>;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  char* buffer = stage + (warpgroup * Shape::buffers + turn) * Shape::chunk_bytes;
  turn = turn + 1 == Shape::buffers ? 0 : turn + 1;
  stage_chunk<c, columns>(sums, args.problem, chunk, buffer);
  if constexpr (c.bulk) {
    publish_to_copies();
    if (thread == 0) wait_stores_read<Shape::buffers - 2>();
  }
  warpgroup_sync(1 + warpgroup);
  // What reaches past the end of a group must not be written; past the end of the result it is not.
  if (c.bulk && columns == 64 && (!GemmTiles<c>::counted || chunk.rows >= Shape::chunk)) {
    if (thread == 0) {
      if constexpr (GemmTiles<c>::apart)
        tensor_store(args.out, chunk.column, chunk.row, chunk.expert, buffer);
      else
        tensor_store(args.out, chunk.column, chunk.row, buffer);
      commit_stores();
    }
  } else {
    copy_chunk<c, columns>(args.problem, chunk, buffer);
  }
}

template <GemmConfig c>
DEVICE void write_tile(const GemmSums<c>& sums, const GemmKernelArgs& args, const GemmTile& tile, char* stage,
                       int& turn) {
  using Shape = GemmShape<c>;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p) {
    const int tall = first_row<c>() + p * 64;
    if constexpr (c.tokens_as_rows) {
      constexpr int whole = c.tile_n / 64 * 64;
      const int row = tile.m + tall;
      if (row >= tile.end) continue;
#pragma unroll
      for (int at = 0; at < whole; at += 64)
        if (tile.n + at < args.problem.columns)
          write_chunk<c, 64>(sums[p] + at / 2, args, {tile.expert, row, tile.n + at, tile.end - row}, stage, turn);
      if constexpr (whole < c.tile_n)
        if (tile.n + whole < args.problem.columns)
          write_chunk<c, c.tile_n - whole>(sums[p] + whole / 2, args,
                                           {tile.expert, row, tile.n + whole, tile.end - row}, stage, turn);
    } else {
      const int column = tile.n + tall;
      if (column >= args.problem.columns) continue;
#pragma unroll
      for (int at = 0; at < c.tile_m; at += Shape::chunk) {
        const int row = tile.m + at;
        if (row < tile.end)
          write_chunk<c, 64>(sums[p] + at / 2, args, {tile.expert, row, column, tile.end - row}, stage, turn);
      }
    }
  }
}

}  // namespace deepinfer
