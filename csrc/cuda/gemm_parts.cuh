// One tile by several blocks, in parts of k.
#pragma once

#include "gemm_write.cuh"

namespace deepinfer {

// The stages that come before those of this cluster, where the tiles that are left are shared out.
DEVICE int share_begin(const GemmKernelArgs& args, int cluster) {
  return cluster * args.share + (cluster < args.longer ? cluster : args.longer);
}

// The sums of part `part`, thread by thread.
template <GemmConfig c>
DEVICE Vec<float, 4>* kept(const GemmKernelArgs& args, int part, int p, int i) {
  constexpr int threads = c.warpgroups * 128;
  return reinterpret_cast<Vec<float, 4>*>(args.partial) +
         (int64_t(part * GemmShape<c>::parts + p) * (c.tile_m / 8) + i) * threads + threadIdx.x;
}

// (In assembly: a copy of the sums in between would make the compiler wait for each product.)
template <GemmConfig c>
DEVICE void keep_sums(const GemmSums<c>& sums, const GemmKernelArgs& args, int part) {
#pragma unroll
  for (int p = 0; p < GemmShape<c>::parts; ++p)
#pragma unroll
    for (int i = 0; i < c.tile_m / 8; ++i) {
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(kept<c>(args, part, p, i)), "f"(sums[p][i * 4]),
                   "f"(sums[p][i * 4 + 1]), "f"(sums[p][i * 4 + 2]), "f"(sums[p][i * 4 + 3]) : "memory");
    }
}

// The second kernel: adds up the parts of the tiles that were cut, always in the same order. A block has a chunk of
// tokens of one part of the columns of a tile.
template <GemmConfig c>
DEVICE void gemm_sum(const GemmKernelArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = GemmShape<c>;
  __shared__ __align__(1024) char staging[c.warpgroups * Shape::chunk_bytes];
  constexpr int chunks = c.tile_m / Shape::chunk;
  const MatmulArgs& problem = args.problem;
  wait_for_previous_kernel();
  let_next_kernel_start();
  GemmTiles<c> tiles;
  tiles.prepare(problem);
  int at = int(blockIdx.x);
  const int first = at % chunks * Shape::chunk, p = at / chunks % Shape::parts;
  at /= chunks * Shape::parts;
  const int rank = at % c.cluster, cut = at / c.cluster;
  const int stages = int((problem.depth + Shape::depth - 1) / Shape::depth), begin = cut * stages, end = begin + stages;
  const int after_longer = begin - args.longer * (args.share + 1);
  int cluster = after_longer < 0 ? begin / (args.share + 1) : args.longer + after_longer / args.share;
  float sums[Shape::chunk / 2] = {};
  constexpr int together = 4;  // parts whose sums are under way at once
  for (; share_begin(args, cluster) < end; cluster += together) {
    Vec<float, 4> more[together][Shape::chunk / 8];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int at_stage = share_begin(args, cluster + j);
      const int part = ((cluster + j) * c.cluster + rank) * 2 + cut - at_stage / stages;
#pragma unroll
      for (int i = 0; i < Shape::chunk / 8; ++i)
        more[j][i] = load_access<float, 4>(
            reinterpret_cast<float*>(kept<c>(args, part, p, first / 8 + i)), at_stage < end);
    }
#pragma unroll
    for (int j = 0; j < together; ++j)
#pragma unroll
      for (int i = 0; i < Shape::chunk / 2; ++i) sums[i] += more[j][i / 4].at[i % 4];
  }
  const GemmTile tile = tiles.at(args.whole + cut, rank);
  const int warpgroup = threadIdx.x / 128;
  const int row = tile.m + first, column = tile.n + warpgroup * Shape::tall + p * 64;
  if (row >= tile.end || column >= problem.columns) return;
  const GemmChunk chunk{tile.expert, row, column, tile.end - row};
  char* buffer = staging + warpgroup * Shape::chunk_bytes;
  stage_chunk<c, 64>(sums, problem, chunk, buffer);
  warpgroup_sync(1 + warpgroup);
  copy_chunk<c, 64>(problem, chunk, buffer);
#endif
}

// The sums of this block into the memory of the ring, which is free by now.
template <GemmConfig c>
DEVICE float* partial(char* ring, int token, int column) {
  return reinterpret_cast<float*>(ring) + token * c.tile_n + (column ^ token / 2 % 4 * 8);
}

template <GemmConfig c>
DEVICE void share_sums(const GemmSums<c>& sums, char* ring) {
  using Shape = GemmShape<c>;
  warpgroups_sync<c.warpgroups>(1);  // the other one may still read the ring
  const int lane = threadIdx.x % 32, first = threadIdx.x / 128 * Shape::tall + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < Shape::across / 2; ++i) {
      const int row = first + p * 64 + i / 2 % 2 * 8, across = i / 4 * 8 + lane % 4 * 2 + i % 2;
      *partial<c>(ring, c.tokens_as_rows ? row : across, c.tokens_as_rows ? across : row) = sums[p][i];
    }
}

// Each block adds up and writes its share of the tokens.
template <GemmConfig c>
DEVICE void write_shared_tile(const MatmulArgs& problem, const GemmTile& tile, char* ring, uint32_t rank) {
  constexpr int tokens = c.tile_m / c.cluster, pieces = c.tile_n / 4;
  for (int i = threadIdx.x; i < tokens * pieces; i += c.warpgroups * 128) {
    const int token = int(rank) * tokens + i / pieces, at = i % pieces * 4, column = tile.n + at;
    if (tile.m + token >= tile.end || column >= problem.columns) continue;
    float sum[4] = {};
    for (int block = 0; block < c.cluster; ++block) {
      const Vec<float, 4> more = load_from_cluster(partial<c>(ring, token, at), block);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += more.at[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sum[j] = finish<c>(sum[j], problem.scale, load_bias<c>(problem, tile.expert, column + j));
    write<c>(problem, tile.expert, tile.m + token, column, sum);
  }
}

}  // namespace deepinfer
