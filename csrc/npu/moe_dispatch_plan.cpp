#include "moe_dispatch_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

ExpertMapTiling tile_expert_map(const ExpertMapArgs& args, const Chip& chip) {
  const int64_t chunks = std::clamp<int64_t>(ceil_div(args.slots, kSlotsAtOnce), 1, chip.cores);
  return {args.slots,       chunks, args.rows, args.num_experts, args.first_expert, args.num_local_experts,
          args.alignment};
}

PermuteTiling tile_permute(const MoePermuteArgs& args, const Chip& chip) {
  constexpr int64_t kBuffers = 4, kFills = 2;
  PermuteTiling tiling{};
  tiling.row_bytes = args.row_bytes;
  tiling.row_stride = args.row_stride;
  tiling.topk = args.topk;
  tiling.rows = args.rows;
  tiling.tokens = args.tokens;
  tiling.x_bytes = args.tokens > 0 ? (args.tokens - 1) * args.row_stride + args.row_bytes : 0;
  tiling.buffers = kBuffers;
  const int64_t room = (chip.buffer_bytes - kRounding - kMapTile * 4) / (kBuffers + kFills) / 32 * 32;
  tiling.chunk = int32_t(std::min(room, round_up(std::max<int64_t>(args.row_bytes, 1), 32)));
  return tiling;
}

int64_t blocks_of(const PermuteTiling& tiling, const Chip& chip) {
  if (tiling.row_bytes == 0) return 0;
  return std::min<int64_t>(chip.cores, ceil_div(tiling.rows, kMapTile));
}

UnpermuteTiling tile_unpermute(const MoeUnpermuteArgs& args, const Chip& chip) {
  constexpr int64_t kEntries = 512;
  const int64_t item = size_of(args.dtype);
  UnpermuteTiling tiling{};
  tiling.row_stride = args.row_stride;
  tiling.hidden_size = args.hidden_size;
  tiling.topk = args.topk;
  tiling.rows = args.rows;
  tiling.tokens = args.tokens;
  tiling.y_bytes = args.rows > 0 ? ((args.rows - 1) * args.row_stride + args.hidden_size) * item : 0;
  tiling.has_weights = args.weights != nullptr;
  const int64_t topk = std::max<int64_t>(args.topk, 1), share = ceil_div(std::max<int64_t>(args.tokens, 1), chip.cores);
  const int64_t at_once = std::clamp<int64_t>(kEntries / topk, 1, share);
  tiling.tokens_at_once = int32_t(at_once);
  // Two rows in, two out, two of floats; the map with weights as they are and as floats.
  const int64_t map = at_once * topk * 12, element = 4 * item + 2 * 4;
  const int64_t room = (chip.buffer_bytes - kRounding - map) / element / 64 * 64;
  tiling.chunk = int32_t(std::min(room, round_up(std::max<int64_t>(args.hidden_size, 1), 32 / item)));
  return tiling;
}

int64_t blocks_of(const UnpermuteTiling& tiling, const Chip& chip) {
  if (tiling.hidden_size == 0) return 0;
  return std::min<int64_t>(chip.cores, ceil_div(tiling.tokens, tiling.tokens_at_once));
}

}  // namespace deepinfer::npu
