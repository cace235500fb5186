// The static facts and the arguments of the attention kernels. Shared by host and device code.
#pragma once

#include "../ops/attention.h"

namespace deepinfer {

struct AttentionPortableConfig {
  DType type;
  AttentionMask mask;
  DType mask_type;  // of a mask that is added
  int threads;
};

struct AttentionDecodeConfig {
  DType type;
  AttentionMask mask;
  DType mask_type;
  int one_mask;     // 1: the queries of a block have one row of the mask
  int depth;        // of a query and a key
  int value_depth;
  int columns;      // queries of a block, in eights
  int warps;
  int cluster;      // blocks that put their parts together in shared memory
  int scratch;      // 1: blocks leave their parts in scratch
};

struct AttentionCombineConfig {
  DType type;
  int threads;
};

// A block takes one key head of one batch, `columns` eights of its queries, and one of `parts` spans of the keys. The
// queries of a key head are counted token by token: row r is head r % group of token r / group.
struct AttentionDecodeArgs {
  AttentionArgs problem;
  int64_t span;        // keys of a part, a multiple of 16
  int parts, blocks_of_rows;
  float* sums;         // [batch x key_heads, parts, rows, value_depth]: not yet divided by the total
  float* stats;        // [batch x key_heads, parts, rows, 2]: greatest score, total of the weights
};

}  // namespace deepinfer
