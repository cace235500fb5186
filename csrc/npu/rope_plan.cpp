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

  const int64_t line = round_up(args.rotary_dim, 16) * (2 * table + 9 * 4 + item);
  const int64_t row = round_up(args.head_size, 32 / item) * (4 * item + 4);
  const int64_t room = (chip.buffer_bytes - kRounding - line) / row;
  tiling.rows = int32_t(std::min({room, kMostRows, std::max<int64_t>(x.in_rows.count, 1)}));
  return tiling;
}

int64_t blocks_of(const RopeTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, tiling.in_groups.count * ceil_div(tiling.in_rows.count, tiling.rows));
}

}  // namespace deepinfer::npu
