// From the sums in registers to the result, through shared memory.
#pragma once

#include "gated.cuh"
#include "gemm_ring.cuh"

namespace deepinfer {

template <GemmConfig c>
DEVICE int64_t out_columns(const MatmulArgs& problem) {
  return c.gates == GatePairs::none ? problem.columns : problem.columns / 2;
}

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
    const Vec<Out, n> added = load_vector<access, n>(addend, column, out_columns<c>(problem));
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i] + to_float(added.at[i]));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i]);
  }
  store_vector<access, n>(out, column, out_columns<c>(problem), rounded);
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

DEVICE void store_two_matrices_transposed(const void* to, const uint32_t (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::
                   "r"(shared_address(to)), "r"(words[0]), "r"(words[1]) : "memory");
}

// What a warpgroup writes at once: 64 columns, fewer of a gated product or of what is left of a tile whose tokens are
// rows of the matrix unit.
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

// The gates and ups of two tokens that are in a thread's registers: rows g and g + 8 of the matrix unit, where g is the
// lane / 4. Where gates have the even rows and ups the odd ones, lanes exchange what they have too much: then those of
// an even g have the pairs of g / 2, those of an odd one of (g + 7) / 2.
template <GemmConfig c>
DEVICE void pair_up(uint32_t& gates, uint32_t& ups) {
  if constexpr (c.gates == GatePairs::neighbours) {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? gates : ups, 4);
    if (odd) gates = other;
    else ups = other;
  }
}

// Column g of 8 for the lanes 4 g to 4 g + 3, see pair_up().
template <GemmConfig c>
DEVICE uint32_t in_order(uint32_t word) {
  if constexpr (c.gates == GatePairs::neighbours) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    return __shfl_sync(0xffffffff, word, (g < 4 ? 2 * g : 2 * g - 7) * 4 + lane % 4);
  }
  return word;
}

// From the registers of a warpgroup, the activated products of its gates and ups from token `at` of the tile on, 32
// columns of every 64. Products and biases are rounded as if they had been stored.
template <GemmConfig c>
DEVICE void stage_gated_chunk(const GemmSums<c>& sums, int at, const GemmKernelArgs& args, const GemmChunk& chunk,
                              char* buffer) {
  const MatmulArgs& problem = args.problem;
  using T = typename GemmShape<c>::Out;
  static_assert(!c.tokens_as_rows && !c.addend && sizeof(T) == 2);
  const Gating<T, c.form, c.limited> gating(problem.limit, problem.alpha, problem.up_offset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, half = int(problem.columns / 2);
#pragma unroll
  for (int p = 0; p < GemmShape<c>::parts; ++p) {
    const int column = chunk.column + p * 32 + warp * 8;
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int at = 2 * column + lane / 4 + i * 8;
      if constexpr (c.gates == GatePairs::eight_apart) {
        const int n = column + lane / 4;
        at = n >= half ? 2 * half : problem.gate_up == GateUp::alternating ? 2 * n + i : n + i * half;
      }
      bias[i] = load_bias<c>(problem, chunk.expert, at);
    }
#pragma unroll
    for (int token = 0; token < GemmShape<c>::chunk; token += 16) {
      uint32_t words[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* of = sums[p] + (at + token) / 2 + j * 4;
        uint32_t gates = Pair<T>::from_floats(finish<c>(of[0], problem.scale, bias[0]),
                                              finish<c>(of[1], problem.scale, bias[0]));
        uint32_t ups = Pair<T>::from_floats(finish<c>(of[2], problem.scale, bias[1]),
                                            finish<c>(of[3], problem.scale, bias[1]));
        pair_up<c>(gates, ups);
        if (c.shared && args.ups_first && chunk.expert == int(problem.experts)) {
          const uint32_t first = gates;
          gates = ups;
          ups = first;
        }
        const auto& gate = reinterpret_cast<const Vec<T, 2>&>(gates);
        const auto& up = reinterpret_cast<const Vec<T, 2>&>(ups);
        words[j] = in_order<c>(Pair<T>::from_floats(gating(value(gate, 0), value(up, 0)),
                                                    gating(value(gate, 1), value(up, 1))));
      }
      store_two_matrices_transposed(
          staged<T>(buffer, token + lane / 8 % 2 * 8 + lane % 8, p * 32 + warp * 8), words);
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
DEVICE void write_chunk(const GemmSums<c>& sums, int part, int at, const GemmKernelArgs& args, const GemmChunk& chunk,
                        char* stage, int& turn) {
  using Shape = GemmShape<c>;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  char* buffer = stage + (warpgroup * Shape::buffers + turn) * Shape::chunk_bytes;
  turn = turn + 1 == Shape::buffers ? 0 : turn + 1;
  if constexpr (c.gates != GatePairs::none) stage_gated_chunk<c>(sums, at, args, chunk, buffer);
  else stage_chunk<c, columns>(sums[part] + at / 2, args.problem, chunk, buffer);
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

// Adds what this warpgroup has written of a tile to what is finished of the expert.
template <GemmConfig c>
DEVICE void report_written(const MatmulArgs& problem, const GemmTile& tile) {
  constexpr int most = GemmShape<c>::tall / 2;
  const int64_t left = out_columns<c>(problem) - (tile.n + first_row<c>()) / 2;
  const int columns = left < 0 ? 0 : left < most ? int(left) : most;
  if constexpr (c.bulk)
    if (threadIdx.x % 128 == 0) wait_stores_written();
  warpgroup_sync(1 + threadIdx.x / 128);
  if (threadIdx.x % 128 == 0) add_release(problem.finished + tile.expert, tile.rows<c.tile_m>() * columns);
}

template <GemmConfig c>
DEVICE void write_tile(const GemmSums<c>& sums, const GemmKernelArgs& args, const GemmTile& tile, char* stage,
                       int& turn) {
  using Shape = GemmShape<c>;
  if constexpr (c.gates != GatePairs::none) {
    const int column = (tile.n + first_row<c>()) / 2;
#pragma unroll
    for (int at = 0; at < c.tile_m; at += Shape::chunk) {
      const int row = tile.m + at;
      if (row < tile.end && column < out_columns<c>(args.problem))
        write_chunk<c, 32 * Shape::parts>(sums, 0, at, args, {tile.expert, row, column, tile.end - row}, stage, turn);
    }
  } else {
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
            write_chunk<c, 64>(sums, p, at, args, {tile.expert, row, tile.n + at, tile.end - row}, stage, turn);
        if constexpr (whole < c.tile_n)
          if (tile.n + whole < args.problem.columns)
            write_chunk<c, c.tile_n - whole>(sums, p, whole, args,
                                             {tile.expert, row, tile.n + whole, tile.end - row}, stage, turn);
      } else {
        const int column = tile.n + tall;
        if (column >= args.problem.columns) continue;
#pragma unroll
        for (int at = 0; at < c.tile_m; at += Shape::chunk) {
          const int row = tile.m + at;
          if (row < tile.end)
            write_chunk<c, 64>(sums, p, at, args, {tile.expert, row, column, tile.end - row}, stage, turn);
        }
      }
    }
  }
}

}  // namespace deepinfer
