#include "quant_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

int64_t code_bytes_of(Code code, int64_t elements) { return code == Code::e2m1 ? elements / 2 : elements; }

int64_t bytes_of(const Scales& scales, int64_t bands) {
  const bool packed = scales.type == ScaleType::packed;
  const int64_t words = packed ? ceil_div(scales.across, 4) : scales.across;
  return (scales.type == ScaleType::e8m0 ? 1 : 4) *
         ((bands / scales.rows - 1) * scales.matrix + (scales.rows - 1) * int64_t(scales.row) +
          (words - 1) * int64_t(scales.column) + 1);
}

namespace {

constexpr int64_t kColumnBytes = 32 + 4 * 4;  // a block of 32 bytes and four lanes a column of a strip

QuantTiling describe(const Blocks& blocks, const Scales& scales) {
  QuantTiling tiling{};
  tiling.matrices = blocks.matrices;
  tiling.rows = blocks.rows;
  tiling.columns = blocks.columns;
  tiling.row_stride = blocks.row_stride;
  tiling.block_rows = blocks.block_rows;
  tiling.block_columns = blocks.block_columns;
  tiling.down = blocks.down;
  tiling.across = blocks.across;
  tiling.scales = scales;
  tiling.scale_bytes = bytes_of(scales, blocks.matrices.count * blocks.down);
  return tiling;
}

// As many blocks as fit into `room` bytes, where an element takes `element` of them and a block `block` more; or a part
// of one.
void cut(QuantTiling& tiling, int64_t room, int64_t element, int64_t block, int64_t alignment, int64_t cores) {
  constexpr int64_t kMostPieces = 1024, kMostRows = 4095, kLongChunk = 2048;
  const int64_t pitch = round_up(tiling.block_columns, alignment);
  const int64_t bytes = tiling.block_rows * pitch * element + block;
  if (tiling.block_rows <= kMostRows && bytes <= room) {
    const int64_t blocks = tiling.matrices.count * tiling.down * tiling.across;
    const int64_t share = std::max<int64_t>(1, ceil_div(blocks, cores));
    tiling.pieces = int32_t(std::min({room / bytes, share, kMostPieces}));
    tiling.chunk_rows = int32_t(tiling.block_rows);
    tiling.chunk = int32_t(tiling.block_columns);
    tiling.pitch = int32_t(pitch);
    return;
  }
  tiling.pieces = 1;
  const int64_t elements = (room - block) / element;
  if (pitch <= elements) {
    tiling.chunk_rows = int32_t(std::min({elements / pitch, tiling.block_rows, kMostRows}));
    tiling.chunk = int32_t(tiling.block_columns);
    tiling.pitch = int32_t(pitch);
  } else {
    tiling.chunk_rows = 1;
    tiling.chunk = tiling.pitch = int32_t(elements / kLongChunk * kLongChunk);
  }
}

// A strip of columns, and as many rows of it as fit.
void cut_columns(QuantTiling& tiling, int64_t room, int64_t element, int64_t column, int64_t alignment) {
  constexpr int64_t kWidest = 512, kMostRows = 4095;
  const int64_t width = std::min(round_up(tiling.columns, alignment), kWidest);
  tiling.pieces = tiling.chunk = tiling.pitch = int32_t(width);
  const int64_t rows = (room - width * column) / (width * element);
  tiling.chunk_rows = int32_t(std::min({rows, tiling.block_rows, kMostRows}));
}

}  // namespace

QuantTiling tile_quantize(const QuantizeArgs& args, const Chip& chip) {
  const Blocks& blocks = args.blocks;
  const int64_t item = size_of(args.dtype);
  QuantTiling tiling = describe(blocks, args.scales);
  tiling.strided_bytes = bytes_of(blocks.matrices, (blocks.rows - 1) * blocks.row_stride + blocks.columns, item);
  tiling.coded = args.codes != nullptr;
  if (args.codes) tiling.dense_bytes = code_bytes_of(args.code, blocks.matrices.count * blocks.rows * blocks.columns);
  // x and codes twice; two floats an element, or three.
  const bool more = args.given || args.code == Code::e2m1 || blocks.block_columns == 1;
  const int64_t element = 2 * item + 2 + (more ? 3 : 2) * 4, alignment = code_alignment(args.code);
  const int64_t room = chip.buffer_bytes - kRounding - quantizer_bytes(0) - 7 * kGroupBytes;
  if (blocks.block_columns == 1) cut_columns(tiling, room, element, kColumnBytes, alignment);
  else cut(tiling, room, element, kGroupBytes, alignment, chip.cores);
  return tiling;
}

QuantTiling tile_dequantize(const DequantizeArgs& args, const Chip& chip) {
  const Blocks& blocks = args.blocks;
  const int64_t item = size_of(args.dtype);
  QuantTiling tiling = describe(blocks, args.scales);
  tiling.strided_bytes =
      bytes_of(blocks.matrices, (blocks.rows - 1) * blocks.row_stride + code_bytes_of(args.code, blocks.columns), 1);
  tiling.dense_bytes = blocks.matrices.count * blocks.rows * blocks.columns * item;
  // Codes and results twice; two floats an element, or three.
  const bool more = args.code == Code::e2m1 || blocks.block_columns == 1;
  const int64_t element = 2 * item + 2 + (more ? 3 : 2) * 4, alignment = code_alignment(args.code);
  const int64_t room = chip.buffer_bytes - kRounding - quantizer_bytes(0) - 7 * kGroupBytes;
  if (blocks.block_columns == 1) cut_columns(tiling, room, element, kColumnBytes, alignment);
  else cut(tiling, room, element, kGroupBytes, alignment, chip.cores);
  return tiling;
}

int64_t blocks_of(const QuantTiling& tiling, const Chip& chip) {
  const int64_t bands = tiling.matrices.count * tiling.down, pieces = tiling.pieces;
  const bool columns = tiling.block_columns == 1;
  const int64_t tiles = columns ? bands * ceil_div(tiling.across, pieces) : ceil_div(bands * tiling.across, pieces);
  return std::min<int64_t>(chip.cores, tiles);
}

}  // namespace deepinfer::npu
