#include "activation_plan.h"

#include <algorithm>

#include "quant_plan.h"
#include "tiling.h"

namespace deepinfer::npu {

namespace {

bool is_quantized(const GatedQuantArgs& args) { return args.quantized.codes != nullptr && args.gated.out == nullptr; }

// What an element takes on the core, and a row beside its elements. Mirrors the buffers of activation_kernel.h.
int64_t element_bytes(const GatedQuantArgs& args) {
  constexpr int64_t kBuffers = 2;
  const int64_t item = size_of(args.gated.dtype), floats = (2 + scratch_of(args.gated.form)) * 4;
  const int64_t out = is_quantized(args) ? kBuffers + item : kBuffers * item;  // codes twice, and the result once
  return 2 * kBuffers * item + out + floats;
}
int64_t row_bytes(const GatedQuantArgs& args) {
  return is_quantized(args) ? quantizer_bytes(args.quantized.scales.across) : 0;
}

}  // namespace

GatedTiling tile_gated(const GatedQuantArgs& quant_args, const Chip& chip) {
  constexpr int64_t kMostRows = 1024;
  const GatedArgs& args = quant_args.gated;
  const int64_t item = size_of(args.dtype), rows = args.gate_rows.count, alignment = 32 / item;
  GatedTiling tiling{};
  tiling.gate_rows = args.gate_rows;
  tiling.up_rows = args.up_rows;
  tiling.size = args.size;
  tiling.gate_bytes = bytes_of(args.gate_rows, args.size, item);
  tiling.up_bytes = bytes_of(args.up_rows, args.size, item);
  tiling.out_bytes = rows * args.size * item;
  tiling.map_bytes = quant_args.rows_to_slots ? rows * 4 : 0;
  tiling.slots = quant_args.rows_to_slots ? quant_args.slots : rows;
  tiling.weight_bytes = args.row_weights ? tiling.slots * 4 : 0;
  tiling.limit = args.limit;
  tiling.alpha = args.alpha;
  tiling.up_offset = args.up_offset;
  if (is_quantized(quant_args)) {
    const QuantizedRows& quantized = quant_args.quantized;
    tiling.out_bytes = code_bytes_of(quantized.code, rows * args.size);
    tiling.scales = quantized.scales;
    tiling.scale_bytes = bytes_of(quantized.scales, rows);
    tiling.group = int32_t(quantized.group);
  }

  const int64_t element = element_bytes(quant_args), room = chip.buffer_bytes - kRounding;
  const int64_t pitch = round_up(args.size, alignment), row = pitch * element + row_bytes(quant_args);
  if (row <= room) {
    const int64_t share = std::max<int64_t>(1, ceil_div(rows, chip.cores));
    tiling.rows = int32_t(std::min({row == 0 ? kMostRows : room / row, share, kMostRows}));
    tiling.chunk = int32_t(args.size);
    tiling.pitch = int32_t(pitch);
  } else {
    tiling.rows = 1;
    tiling.chunk = tiling.pitch = int32_t(room / element / 64 * 64);
  }
  return tiling;
}

bool quantizes_rows(const GatedQuantArgs& args, const Chip& chip) {
  const QuantizedRows& rows = args.quantized;
  const int64_t alignment = code_alignment(rows.code), size = args.gated.size;
  const bool aligned = size % alignment == 0 && rows.group % alignment == 0;
  return aligned && size * element_bytes(args) + row_bytes(args) + kRounding <= chip.buffer_bytes;
}

int64_t blocks_of(const GatedTiling& tiling, const Chip& chip) {
  if (tiling.size == 0) return 0;
  const int64_t tiles = ceil_div(tiling.gate_rows.count, tiling.rows) * ceil_div(tiling.size, tiling.chunk);
  return std::min<int64_t>(chip.cores, tiles);
}

}  // namespace deepinfer::npu
