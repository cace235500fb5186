// The ring of stages between the thread that loads and the warpgroups that multiply.
#pragma once

#include "gemm_tiles.cuh"
#include "wgmma.cuh"

namespace deepinfer {

template <GemmConfig c>
struct GemmShape {
  using Out = Element<c.out>;
  using Staged = Element<c.addend ? DType::f32 : c.out>;  // what is added to is not yet rounded

  static constexpr int depth = c.type == Operand::e4m3 ? 128 : 64;  // k of a stage
  static constexpr int steps = 4;                                   // of the matrix unit, 32 bytes of k each
  static constexpr int weight_bytes = c.tile_n * 128, x_bytes = c.tile_m * 128, stage_bytes = weight_bytes + x_bytes;
  // The products of a warpgroup: `parts` times 64 rows by `across` columns, as the matrix unit sees it.
  static constexpr int sharers = c.in_turn ? 1 : c.warpgroups;  // of a tile
  static constexpr int tall = (c.tokens_as_rows ? c.tile_m : c.tile_n) / sharers, parts = tall / 64;
  static constexpr int across = c.tokens_as_rows ? c.tile_n : c.tile_m;
  static constexpr int sharing = c.split ? 1 : c.cluster;  // blocks that load tokens for each other
  static constexpr bool ragged = GemmTiles<c>::counted && c.tile_m > 32;  // tiles of fewer tokens cost less
  // Tokens that are loaded at once.
  static constexpr int box = !c.x_dense_k ? 64 : ragged ? 32 : c.tile_m / sharing;
  static constexpr int chunk = c.tokens_as_rows ? 64 : c.tile_m < 32 ? c.tile_m : 32;  // tokens written at once
  static constexpr int chunk_bytes = chunk * 64 * sizeof(Staged);
  static constexpr int buffers = !c.bulk ? 2 : c.tokens_as_rows ? 3 : GemmTiles<c>::counted ? 2 : 4;  // of a chunk
  static constexpr int block_bytes = depth * 128;  // of 64 rows of an operand whose k is not dense
  static constexpr bool scaled = c.type == Operand::e4m3;
  // Of many e4m3 tokens: whether the registers of a thread hold two sets of products; if not, the warpgroups begin
  // their stages one after the other, so that one multiplies while the other adds up.
  static constexpr bool paired = c.tile_n <= 128 && c.warpgroups <= 2;
  static constexpr bool staggered = scaled && c.tokens_as_rows && !paired && c.warpgroups == 2;
  // Registers of a thread. Together no more than the block was launched with: 168 for each of 384 threads, 128 of 512.
  static constexpr bool many_sums = scaled ? across > 128 : c.in_turn && across > 160;
  static constexpr int loader_registers = many_sums ? 40 : 56;
  static constexpr int registers = c.warpgroups == 3 ? 152 : many_sums ? 232 : 224;
  static constexpr int row_step = scaled ? c.tile_m : c.tile_m > 128 ? 32 : 16;  // registers allow e4m3 no other
  // The scales of the tokens of a stage, from a multiple of 16 bytes on.
  static constexpr int scales = !scaled ? 0 : c.tile_m + (c.groups == RowGroups::none ? 0 : 4);
  static constexpr int scale_bytes = (scales * 4 + 127) / 128 * 128;
};

template <GemmConfig c>
struct GemmRing {
  using Shape = GemmShape<c>;

  char* stages;
  uint64_t* full;   // the copy engine has brought all bytes
  uint64_t* empty;  // all warps that read them are done

  DEVICE char* weight(int stage) const { return stages + stage * Shape::stage_bytes; }
  DEVICE char* x(int stage) const { return weight(stage) + Shape::weight_bytes; }
  // As the matrix unit sees them.
  DEVICE char* rows(int stage) const { return c.tokens_as_rows ? x(stage) : weight(stage); }
  DEVICE char* columns(int stage) const { return c.tokens_as_rows ? weight(stage) : x(stage); }
  DEVICE float* scales(int stage) const {
    return reinterpret_cast<float*>(stages + c.stages * Shape::stage_bytes + stage * Shape::scale_bytes);
  }
};

// The first row of a tile, as the matrix unit sees it, that this warpgroup has.
template <GemmConfig c>
DEVICE int first_row() {
  return c.in_turn ? 0 : threadIdx.x / 128 * GemmShape<c>::tall;
}

template <GemmConfig c>
DEVICE void release(const GemmRing<c>& ring, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (GemmShape<c>::sharing > 1) {
    if (lane < c.cluster) arrive_at(&ring.empty[stage], lane);
  } else {
    if (lane == 0) arrive(&ring.empty[stage]);
  }
}

template <GemmConfig c>
using GemmSums = float[GemmShape<c>::parts][GemmShape<c>::across / 2];

}  // namespace deepinfer
