// A walk over a map of slots. Include from kernel files only.
#pragma once

#include "moe_dispatch_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

// Calls write(row, map[row]) for the rows of a core: the scalar unit reads the map a tile at a time, through `slots` of
// kMapTile entries.
template <typename Write>
__aicore__ inline void for_slots(TPipe& pipe, const GlobalTensor<int32_t>& map, const LocalTensor<int32_t>& slots,
                                 int64_t rows, Write write) {
  const int64_t tiles = (rows + kMapTile - 1) / kMapTile;
  for (int64_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
    const int64_t first = tile * kMapTile, left = rows - first;
    const int32_t count = left < kMapTile ? int32_t(left) : kMapTile;
    DataCopyExtParams params;
    params.blockLen = uint32_t(count) * uint32_t(sizeof(int32_t));
    DataCopyPad(slots, map[uint64_t(first)], params, DataCopyPadExtParams<int32_t>{});
    hand_over<HardEvent::MTE2_S>(pipe);
    for (int32_t i = 0; i < count; ++i) write(first + i, slots.GetValue(uint32_t(i)));
    hand_over<HardEvent::S_MTE2>(pipe);
  }
}

}  // namespace deepinfer::npu
