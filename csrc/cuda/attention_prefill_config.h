// The static facts and the arguments of attention of many queries. Shared by host and device code.
#pragma once

#include "../ops/attention.h"
#include "tensor_map.h"

namespace deepinfer {

struct AttentionPrefillConfig {
  DType type;
  int depth, value_depth;  // 64, 128 or 192; 64 or 128
  int rope_depth;          // of the depth, columns that lie elsewhere: 0 or 64
  int causal;
};

struct AttentionPrefillArgs {
  TensorMap query, key, value, query_rope, key_rope;  // element, token, head, batch
  AttentionArgs problem;
  bool rope_of_all;  // the key heads share key_rope
  int section;  // heads of all batches whose queries are worked on at the same time
};

}  // namespace deepinfer
