#include "quant_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

QuantTiling tile_quantize(const QuantizeArgs& args, const Chip& chip) {
  constexpr int64_t kMostPieces = 1024, kAlignment = 32;  // codes of one byte in a block
  const Blocks& blocks = args.blocks;
  const int64_t item = size_of(args.dtype), rows = blocks.matrices.count;
  QuantTiling tiling{};
  tiling.rows = blocks.matrices;
  tiling.columns = blocks.columns;
  tiling.group = blocks.block_columns;
  tiling.across = blocks.across;
  tiling.scales = args.scales;
  tiling.x_bytes = bytes_of(blocks.matrices, blocks.columns, item);
  tiling.code_bytes = rows * blocks.columns;
  const Scales& scales = args.scales;
  const int64_t last_matrix = rows / scales.rows - 1;
  tiling.scale_bytes = 4 * (last_matrix * scales.matrix + (scales.rows - 1) * int64_t(scales.row) +
                            (scales.across - 1) * int64_t(scales.column) + 1);

  // x and codes twice, two floats an element; four floats of a block each a group; two vectors of 64 floats.
  const int64_t element = 2 * item + 2 + 2 * 4, piece = 4 * 32;
  const int64_t room = chip.buffer_bytes - kRounding - 2 * 64 * 4;
  const int64_t pitch = round_up(tiling.group, kAlignment);
  if (pitch * element + piece <= room) {
    const int64_t share = std::max<int64_t>(1, ceil_div(rows * tiling.across, chip.cores));
    tiling.pieces = int32_t(std::min({room / (pitch * element + piece), share, kMostPieces}));
    tiling.chunk = int32_t(tiling.group);
    tiling.pitch = int32_t(pitch);
  } else {
    tiling.pieces = 1;
    tiling.chunk = tiling.pitch = int32_t((room - piece) / element / 2048 * 2048);
  }
  return tiling;
}

int64_t blocks_of(const QuantTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, ceil_div(tiling.rows.count * tiling.across, tiling.pieces));
}

}  // namespace deepinfer::npu
