// The static facts of the dispatch kernels. Shared by host and device code.
#pragma once

#include "../ops/moe_dispatch.h"

namespace deepinfer {

// The row of a slot with expert -1 or one of another rank, or the slot of a row without.
constexpr int32_t kDropped = -1;

struct ExpertMapConfig {
  int wide_ids;
  int counted;   // 1: expert_count ran first, `cursors` holds the counts of each chunk
  int cluster;   // blocks that read each other's counts, all there are; 1 if counted
  int bits;      // of a local expert
  int rounds;    // slots that a thread holds in registers: a block takes that many times its threads
  int capacity;  // entries of the tables in shared memory: a multiple of `threads`, at least num_local_experts
  int threads;
};

constexpr int kRowsToFill = 32;  // that a block of moe_permute behind those of the tokens looks at, one a lane

struct MoePermuteConfig {
  int access;   // bytes that alignment lets one access move
  int topk;     // known and small, or 0
  int vectors;  // accesses of a thread that are in flight together
  int threads;
  int stage_bytes;  // of shared memory that hold a piece of a row, or 0 without the bulk copy engine
};

struct MoePermuteScalesConfig {
  int bytes;    // of a scale
  int by_rows;  // 1: neighbouring threads take neighbouring rows, which lie beside each other in the result
  int threads;
};

struct MoeUnpermuteConfig {
  DType out, weights;
  int coded;     // 1: the rows are float8_e4m3fn and have scales
  int weighted;
  int added;    // 1: a row is added to the rounded sum
  int access;   // elements that alignment lets one access move
  int topk;     // known and small, or 0
  int threads;  // that add up
  int stages;   // of topk pieces of rows in shared memory, or 0 without the bulk copy engine
};

}  // namespace deepinfer
