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

PermuteScalesTiling tile_permute_scales(const MoePermuteScalesArgs& args) {
  constexpr int64_t kColumns = 256;
  PermuteScalesTiling tiling{};
  tiling.row_stride = args.row_stride;
  tiling.column_stride = args.column_stride;
  tiling.out_row_stride = args.out_row_stride;
  tiling.out_column_stride = args.out_column_stride;
  tiling.columns = args.columns;
  tiling.topk = args.topk;
  tiling.rows = args.rows;
  tiling.tokens = args.tokens;
  const auto bytes = [&](int64_t rows, int64_t row, int64_t column) {
    return rows > 0 && args.columns > 0 ? ((rows - 1) * row + (args.columns - 1) * column + 1) * args.bytes : 0;
  };
  tiling.scale_bytes = bytes(args.tokens, args.row_stride, args.column_stride);
  tiling.out_bytes = bytes(args.rows, args.out_row_stride, args.out_column_stride);
  tiling.chunk = int32_t(std::clamp<int64_t>(args.columns, 1, kColumns));
  return tiling;
}

int64_t blocks_of(const PermuteScalesTiling& tiling, const Chip& chip) {
  if (tiling.columns == 0) return 0;
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
  const int64_t row_item = args.coded ? 1 : item;
  tiling.y_bytes = args.rows > 0 ? ((args.rows - 1) * args.row_stride + args.hidden_size) * row_item : 0;
  tiling.has_weights = args.weights != nullptr;
  const int64_t topk = std::max<int64_t>(args.topk, 1), share = ceil_div(std::max<int64_t>(args.tokens, 1), chip.cores);
  const int64_t at_once = std::clamp<int64_t>(kEntries / topk, 1, share);
  tiling.tokens_at_once = int32_t(at_once);
  // Two rows in, two out, two of floats; the map with weights as they are and as floats.
  const int64_t map = at_once * topk * 12, element = 4 * item + 2 * 4;
  const int64_t room = (chip.buffer_bytes - kRounding - map) / element / 64 * 64;
  tiling.chunk = int32_t(std::min(room, round_up(std::max<int64_t>(args.hidden_size, 1), 32 / row_item)));
  return tiling;
}

int64_t blocks_of(const UnpermuteTiling& tiling, const Chip& chip) {
  if (tiling.hidden_size == 0) return 0;
  return std::min<int64_t>(chip.cores, ceil_div(tiling.tokens, tiling.tokens_at_once));
}

}  // namespace deepinfer::npu
