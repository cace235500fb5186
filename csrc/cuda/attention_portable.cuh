// Attention without the matrix unit, for any dtype and alignment: a warp for one query of one head. Lanes take keys for
// the scores and columns for the values. Bound by multiply-adds and by reading keys again for each query.
#pragma once

#include "attention_config.h"
#include "attention_mask.cuh"

namespace deepinfer {

template <AttentionPortableConfig c>
DEVICE void attention_portable(const AttentionArgs& args) {
  using T = Element<c.type>;
  constexpr int kWarps = c.threads / 32, kColumns = 256 / 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t rows = args.batch * args.heads * args.queries;
  for (int64_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += int64_t(gridDim.x) * kWarps) {
    const int64_t query = row % args.queries, head = row / args.queries % args.heads;
    const int64_t batch = row / args.queries / args.heads, shared = head / (args.heads / args.key_heads);
    const auto at = [&](const void* data, const HeadStrides& s, int64_t h, int64_t token) {
      return static_cast<const T*>(data) + batch * s.batch + h * s.head + token * s.token;
    };
    const T* q = at(args.query, args.query_strides, head, query);
    const int64_t mask_row = batch * args.mask_batch + head * args.mask_head + query * args.mask_query;
    const int64_t end = c.mask == AttentionMask::causal && query + 1 < args.keys ? query + 1 : args.keys;
    float greatest = hidden_score(), total = 0.f, sums[kColumns] = {};
    for (int64_t first = 0; first < end; first += 32) {
      const int64_t key = first + lane;
      float score = hidden_score();
      if (key < end) {
        const float added = added_to_score<c.mask, c.mask_type>(args, mask_row + key * args.mask_key, query, key);
        if (added != hidden_score()) {
          const T* k = at(args.key, args.key_strides, shared, key);
          float product = 0.f;
          for (int d = 0; d < args.depth; ++d) product = fmaf(to_float(q[d]), to_float(k[d]), product);
          score = product * args.scale + added;
        }
      }
      uint32_t seen = __ballot_sync(0xffffffff, score != hidden_score());
      if (seen == 0) continue;
      const float most = fmaxf(greatest, over_warp<Maximum, 32>(score)), base = base_of(most);
      const float weight = weight_of(score, base), kept = weight_of(greatest, base);
      greatest = most;
      total = total * kept + over_warp<Addition, 32>(weight);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] *= kept;
      for (; seen != 0; seen &= seen - 1) {
        const int from = __ffs(seen) - 1;
        const float share = __shfl_sync(0xffffffff, weight, from);
        const T* v = at(args.value, args.value_strides, shared, first + from);
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          if (lane + 32 * i < args.value_depth) sums[i] = fmaf(share, to_float(v[lane + 32 * i]), sums[i]);
      }
    }
    const float factor = total == 0.f ? 0.f : 1.f / total;
    T* out = const_cast<T*>(at(args.out, args.out_strides, head, query));
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (lane + 32 * i < args.value_depth) out[lane + 32 * i] = from_float<T>(sums[i] * factor);
  }
}

}  // namespace deepinfer
