#include "rope_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

RopeTiling tile_rope(const RopeArgs& args, int tensor, const Chip& chip) {
  constexpr int64_t kMostRows = 128;
  const RopeTensor& x = args.tensors[tensor];
  const int64_t item = size_of(args.dtype), table = size_of(args.table_dtype);
  RopeTiling tiling{};
  tiling.in_groups = x.in_groups;
  tiling.in_rows = x.in_rows;
  tiling.out_groups = x.out_groups;
  tiling.out_rows = x.out_rows;
  tiling.cos_groups = x.cos.groups;
  tiling.sin_groups = x.sin.groups;
  tiling.position_groups = x.position_groups;
  // A row of a group: both walks from their first elements.
  const auto bytes = [&](const Rows& groups, const Rows& rows) {
    return bytes_of(groups, 0, item) + bytes_of(rows, args.head_size, item);
  };
  tiling.in_bytes = bytes(x.in_groups, x.in_rows);
  tiling.out_bytes = bytes(x.out_groups, x.out_rows);
  tiling.positioned = args.positions != nullptr;
  if (tiling.positioned) {
    const int64_t last = std::max<int64_t>(args.cache_rows - 1, 0);
    tiling.cos_bytes = args.cache_rows ? (last * x.cos.row_stride + args.columns) * table : 0;
    tiling.sin_bytes = args.cache_rows ? (last * x.sin.row_stride + args.columns) * table : 0;
    tiling.position_bytes = bytes_of(x.position_groups, 1, args.wide_positions ? 8 : 4);
  } else {
    tiling.cos_bytes = bytes_of(x.cos.groups, args.columns, table);
    tiling.sin_bytes = bytes_of(x.sin.groups, args.columns, table);
  }
  tiling.cos_row_stride = x.cos.row_stride;
  tiling.sin_row_stride = x.sin.row_stride;
  tiling.cache_rows = args.cache_rows;
  tiling.sin_sign = args.sin_sign;
  tiling.head_size = int32_t(args.head_size);
  tiling.rotary_dim = int32_t(args.rotary_dim);
  tiling.columns = int32_t(args.columns);

  // Mirrors the buffers of rope_kernel.h.
  const int64_t pitch = round_up(args.head_size, 32 / item), line = round_up(args.rotary_dim, 16);
  constexpr int64_t kStridesReach = 255 * 8;
  tiling.together = args.style == RopeStyle::half && args.rotary_dim % 16 == 0 && pitch <= kStridesReach;
  int64_t fixed = line * (2 * table + 4 * 4 + 3 * 4), row = pitch * (4 * item + 4);
  (tiling.together ? row : fixed) += line * (2 * 4 + item);
  if (args.normed) {
    tiling.eps = args.norm.eps;
    if (args.norm.form != WeightForm::none) {
      tiling.weight_bytes = args.head_size * size_of(args.norm.weight_dtype);
      fixed += pitch * (size_of(args.norm.weight_dtype) + 4);
    }
    fixed += row_norm_bytes(1);
    row += pitch * 4 + row_norm_bytes(8) / 8;
  }
  const int64_t room = (chip.buffer_bytes - kRounding - fixed) / row;
  tiling.rows = int32_t(std::min({room, kMostRows, std::max<int64_t>(x.in_rows.count, 1)}));
  return tiling;
}

int64_t blocks_of(const RopeTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, tiling.in_groups.count * ceil_div(tiling.in_rows.count, tiling.rows));
}

}  // namespace deepinfer::npu
