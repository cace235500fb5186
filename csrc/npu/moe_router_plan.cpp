#include "moe_router_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

namespace {

// Of a reduction with its index: a pair for every 64 values, then for every 64 of these, until one is left.
int64_t reduction_work(int64_t count) {
  int64_t floats = 0;
  while (count > 2) {
    count = 2 * ceil_div(count, 64);
    floats += round_up(count, 8);
  }
  return std::max<int64_t>(floats, 64);
}

// Mirrors the buffers of moe_router_kernel.h: logits, scores, keys and scratch; weights as floats and as results, ids; a
// block for the best of a token; once for all tokens the bias and the groups.
int64_t bytes_on_core(const MoeRouterArgs& args, const MoeRouterTiling& tiling, int64_t tokens, int64_t buffers) {
  const int64_t item = size_of(args.dtype), weight = size_of(args.weights_dtype), id = args.wide_ids ? 8 : 4;
  const bool aligned = args.num_experts / args.num_groups % 8 == 0;
  const int64_t group_blocks = tiling.group_keys > 0 && aligned ? args.num_groups : 1;
  const int64_t shared = tiling.pitch * (args.bias ? 4 : 0) + tiling.work * 4 + group_blocks * 32 +
                         round_up(args.num_groups, 8) * 4;
  const int64_t token = tiling.pitch * (buffers * item + (2 + scratch_of(args.score)) * 4) +
                        tiling.choices * (4 + weight + id) + 2 * 32;
  return tokens * token + shared + kRounding;
}

}  // namespace

MoeRouterTiling tile_moe_router(const MoeRouterArgs& args, const Chip& chip) {
  constexpr int64_t kMostTokens = 32, kAlignment = 16;
  const int64_t item = size_of(args.dtype);
  MoeRouterTiling tiling{};
  tiling.rows.count = args.tokens;
  tiling.rows.dims = 1;
  tiling.rows.sizes[0] = args.tokens;
  tiling.rows.strides[0] = args.row_stride;
  tiling.logits_bytes = bytes_of(tiling.rows, args.num_experts, item);
  tiling.renorm_eps = args.renorm_eps;
  tiling.renorm_min = args.renorm_min;
  tiling.scale = args.scale;
  tiling.experts = int32_t(args.num_experts);
  tiling.topk = int32_t(args.topk);
  tiling.groups = int32_t(args.num_groups);
  tiling.kept_groups = int32_t(args.topk_groups);
  tiling.biased = args.bias != nullptr;
  const int group_keys = args.group_score == GroupScore::top2_sum ? 2 : 1;
  tiling.group_keys = args.topk_groups == args.num_groups ? 0 : group_keys;
  tiling.after = args.score_after_topk;
  tiling.renormalize = args.renormalize;
  tiling.pitch = int32_t(round_up(args.num_experts, kAlignment));
  tiling.choices = int32_t(round_up(args.topk, kAlignment));
  tiling.work = int32_t(reduction_work(args.num_experts));

  const auto fits = [&](int64_t tokens, int64_t buffers) {
    return bytes_on_core(args, tiling, tokens, buffers) <= chip.buffer_bytes;
  };
  tiling.buffers = fits(1, 2) ? 2 : 1;
  const int64_t share = std::clamp<int64_t>(ceil_div(args.tokens, chip.cores), 1, kMostTokens);
  tiling.tokens = 1;
  while (tiling.tokens < share && fits(tiling.tokens + 1, tiling.buffers)) ++tiling.tokens;
  return tiling;
}

bool router_fits(const MoeRouterArgs& args, const Chip& chip) {
  return bytes_on_core(args, tile_moe_router(args, chip), 1, 1) <= chip.buffer_bytes;
}

int64_t blocks_of(const MoeRouterTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, ceil_div(tiling.rows.count, tiling.tokens));
}

}  // namespace deepinfer::npu
