#include "activation_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

GatedTiling tile_gated(const GatedArgs& args, const Chip& chip) {
  constexpr int64_t kMostRows = 1024, kQueues = 3, kBuffers = 2;
  const int64_t item = size_of(args.dtype), rows = args.gate_rows.count, alignment = 32 / item;
  GatedTiling tiling{};
  tiling.gate_rows = args.gate_rows;
  tiling.up_rows = args.up_rows;
  tiling.size = args.size;
  tiling.gate_bytes = bytes_of(args.gate_rows, args.size, item);
  tiling.up_bytes = bytes_of(args.up_rows, args.size, item);
  tiling.weight_bytes = args.row_weights ? rows * 4 : 0;
  tiling.out_bytes = rows * args.size * item;
  tiling.limit = args.limit;
  tiling.alpha = args.alpha;
  tiling.up_offset = args.up_offset;

  const int64_t element = kQueues * kBuffers * item + (2 + scratch_of(args.form)) * 4;
  const int64_t room = (chip.buffer_bytes - kRounding) / element / 64 * 64;
  const int64_t pitch = round_up(args.size, alignment);
  if (pitch <= room) {
    const int64_t share = std::max<int64_t>(1, ceil_div(rows, chip.cores));
    tiling.rows = int32_t(std::min({room / pitch, share, kMostRows}));
    tiling.chunk = int32_t(args.size);
    tiling.pitch = int32_t(pitch);
  } else {
    tiling.rows = 1;
    tiling.chunk = tiling.pitch = int32_t(room);
  }
  return tiling;
}

int64_t blocks_of(const GatedTiling& tiling, const Chip& chip) {
  if (tiling.size == 0) return 0;
  const int64_t tiles = ceil_div(tiling.gate_rows.count, tiling.rows) * ceil_div(tiling.size, tiling.chunk);
  return std::min<int64_t>(chip.cores, tiles);
}

}  // namespace deepinfer::npu
