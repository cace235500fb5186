#include "norm_plan.h"

#include <algorithm>

#include "quant_plan.h"
#include "tiling.h"

namespace deepinfer::npu {

namespace {

bool is_quantized(const RmsNormArgs& args) { return args.quantized.codes != nullptr && args.out == nullptr; }

// What a tile takes on the core. Mirrors the buffers of norm_kernel.h.
int64_t bytes_on_core(const RmsNormArgs& args, int64_t rows, int64_t pitch, int64_t buffers) {
  const int64_t x = size_of(args.dtype), out = size_of(args.out_dtype);
  const int64_t queues = x + out + (args.residual ? 2 * x : 0);
  constexpr int64_t kFloats = 2 * 4, kTotal = 64 * 4;
  const int64_t weight = args.form == WeightForm::none ? 0 : pitch * (size_of(args.weight_dtype) + 4);
  // Codes take the place of the norm, which stays on the core.
  const bool quantizes = is_quantized(args);
  const int64_t codes = quantizes ? out + (args.quantized.code == Code::e2m1 ? 4 : 0) : 0;
  const int64_t scales = quantizes ? quantizer_bytes(rows * args.quantized.scales.across) : 0;
  const int64_t queued = quantizes ? queues - out + 1 : queues;
  return rows * pitch * (buffers * queued + codes + kFloats) + row_norm_bytes(rows) + weight + scales + kTotal +
         kRounding;
}

}  // namespace

RmsNormTiling tile_rms_norm(const RmsNormArgs& args, const Chip& chip) {
  constexpr int64_t kMostRows = 64;
  const int64_t alignment = 32 / size_of(args.dtype);  // rows lie side by side on the core, in whole blocks
  RmsNormTiling tiling{};
  tiling.x_rows = args.x_rows;
  tiling.residual_rows = args.residual_rows;
  tiling.hidden_size = args.hidden_size;
  tiling.x_bytes = bytes_of(args.x_rows, args.hidden_size, size_of(args.dtype));
  if (args.residual) tiling.residual_bytes = bytes_of(args.residual_rows, args.hidden_size, size_of(args.dtype));
  if (args.weight) tiling.weight_bytes = args.hidden_size * size_of(args.weight_dtype);
  tiling.out_bytes = args.x_rows.count * args.hidden_size * size_of(args.out_dtype);
  if (args.sum) tiling.sum_bytes = args.x_rows.count * args.hidden_size * size_of(args.dtype);
  if (is_quantized(args)) {
    const QuantizedRows& rows = args.quantized;
    tiling.out_bytes = code_bytes_of(rows.code, args.x_rows.count * args.hidden_size);
    tiling.scales = rows.scales;
    tiling.scale_bytes = bytes_of(rows.scales, args.x_rows.count);
    tiling.group = int32_t(rows.group);
  }
  tiling.eps = args.eps;

  const auto fits = [&](int64_t rows, int64_t pitch, int64_t buffers) {
    return bytes_on_core(args, rows, pitch, buffers) <= chip.buffer_bytes;
  };
  int64_t rows = 1, chunk = args.hidden_size, buffers = 2;
  const int64_t pitch = round_up(args.hidden_size, alignment);
  if (fits(1, pitch, 1)) {
    if (!fits(1, pitch, 2)) buffers = 1;
    const int64_t share = std::max<int64_t>(1, ceil_div(args.x_rows.count, chip.cores));
    while (rows < std::min(share, kMostRows) && fits(rows + 1, pitch, buffers)) ++rows;
  } else {
    chunk = RmsNormTiling::kPiece;
    while (fits(1, chunk + RmsNormTiling::kPiece, buffers)) chunk += RmsNormTiling::kPiece;
  }
  tiling.rows = int32_t(rows);
  tiling.chunk = int32_t(chunk);
  tiling.pitch = int32_t(round_up(chunk, alignment));
  tiling.buffers = int32_t(buffers);
  return tiling;
}

bool quantizes_rows(const RmsNormArgs& args, const Chip& chip) {
  const QuantizedRows& rows = args.quantized;
  const int64_t alignment = code_alignment(rows.code);
  const bool aligned = args.hidden_size % alignment == 0 && rows.group % alignment == 0;
  return aligned && bytes_on_core(args, 1, args.hidden_size, 1) <= chip.buffer_bytes;
}

int64_t blocks_of(const RmsNormTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, ceil_div(tiling.x_rows.count, tiling.rows));
}

}  // namespace deepinfer::npu
