// What attention hands to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// Which keys a query sees: all; those up to its own index; those where the mask is not 0; all, with the mask added to
// the scores, where -inf hides a key.
enum class AttentionMask : int { none, causal, boolean, added };

// In elements; a token's elements are dense.
struct HeadStrides {
  int64_t batch, head, token;
};

// out[b, h, i] = sum_j softmax_j(scale * query[b, h, i] . key[b, g, j] + mask[b, h, i, j]) value[b, g, j] with the key
// head g = h / (heads / key_heads). A query that sees no key gets zeros.
struct AttentionArgs {
  const void* query;  // [batch, heads, queries, depth] of `type`
  const void* key;    // [batch, key_heads, keys, depth]
  const void* value;  // [batch, key_heads, keys, value_depth]
  const void* mask;   // [batch, heads, queries, keys]: bytes if boolean, or of mask_type
  void* out;          // [batch, heads, queries, value_depth]
  int64_t batch, heads, key_heads, queries, keys, depth, value_depth;
  HeadStrides query_strides, key_strides, value_strides, out_strides;
  int64_t mask_batch, mask_head, mask_query, mask_key;  // strides of the mask, 0 where it is expanded
  // More columns of queries and keys, behind those above, or null: [batch, heads, queries, rope_depth] and
  // [batch, key_heads, keys, rope_depth], of which the stride of a head may be 0.
  const void* query_rope;
  const void* key_rope;
  int64_t rope_depth;
  HeadStrides query_rope_strides, key_rope_strides;
  float scale;
  DType type, mask_type;
  AttentionMask mask_kind;
};

}  // namespace deepinfer
