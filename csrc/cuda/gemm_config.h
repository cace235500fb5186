// The static facts and the arguments of the matrix kernels. Shared by host and device code.
#pragma once

#include "../ops/gemm.h"
#include "tensor_map.h"

namespace deepinfer {

enum class Operand : int { bf16, f16, e4m3, f32 };

// Where a gate and its up lie among the rows of the matrix unit: nowhere, or 8 rows or one row apart.
enum class GatePairs : int { none, eight_apart, neighbours };

// A tile of the result is tile_n columns, which are rows of the weight, by tile_m rows, which are tokens. The weight
// takes the side of the matrix unit that comes in 64s and the tokens the side that comes in 16s, so that few tokens
// waste little. Many e4m3 tokens take the other side: then a thread has to do with two of their scales, not with many.
struct GemmConfig {
  Operand type;
  DType out;
  int weight_dense_k, x_dense_k;  // 1: k is the dense dimension of the operand
  int tile_n, tile_m;
  int tokens_as_rows;  // 1: of the matrix unit, 0: the columns of the result are
  int warpgroups;      // that multiply: each has 64 or 128 of these rows
  int in_turn;         // 1: two warpgroups take tiles in turn, one multiplies and one writes; 0: they share each tile
  int stages;
  int cluster;  // blocks
  int split;  // 1: the blocks of a cluster share out k of a tile; 0: they load the same tokens, for tiles side by side
  int streamed;  // 1: the blocks share out the k of the tiles that are left when all have had the same number
  int column_scales;  // e4m3: 1: the weight has a scale for each column, 0: for each 128
  RowGroups groups;
  BiasStep bias;
  int addend;  // 1: a matrix is added
  GatePairs gates;
  Gated form;      // of gates
  int limited;     // 1: gate and up are clamped
  int shared;      // 1: one expert more sees all tokens
  int handed_out;  // 1: a block takes the next tile when it is ready for it, 0: every so many-th tile
  int bulk;    // 1: the copy engine writes the result, 2 bytes an element
  int access;  // elements that alignment lets one store move
  int blocks;  // of a processor at once
};

struct GemmKernelArgs {
  TensorMap weight;   // k, n, expert; n, k, expert if k is not dense
  TensorMap x;        // k, m; m, k if k is not dense
  TensorMap x_scale;  // m, block of k, for e4m3
  TensorMap out;      // n, m, if the copy engine writes
  TensorMap shared_weight, shared_x;  // of the expert that sees all tokens
  MatmulArgs problem;
  float* partial;  // sums of parts of tiles, for streamed ones
  int whole;       // tiles that are not cut; each cluster has `share` stages of k of the others,
  int share, longer;  // and the first `longer` clusters one more
  bool weight_read_once;
  bool ups_first;  // of the shared weight: the ups lie before the gates
};

}  // namespace deepinfer
