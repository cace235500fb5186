// Rows of tokens gathered in the order of experts. Only copies: each row goes from global memory to the core and back, a
// few rows under way at once. Slots come from the map through the scalar unit, a tile of the map at a time. Rows without
// a token are zero; a slot out of range gives bytes of 0xff, which are NaN in every floating-point type. Bound by memory
// for rows of a few KB, by the number of copies for shorter ones.
//
// Config: nothing.
#pragma once

#include "slots.h"

namespace deepinfer::npu {

class Permute {
 public:
  __aicore__ inline Permute(GM_ADDR x, GM_ADDR map, GM_ADDR out, const PermuteTiling& tiling) : tiling_(tiling) {
    x_.SetGlobalBuffer(x, uint64_t(tiling.x_bytes));
    map_.SetGlobalBuffer((__gm__ int32_t*)map, uint64_t(tiling.rows));
    out_.SetGlobalBuffer(out, uint64_t(tiling.rows * tiling.row_bytes));
    pipe_.InitBuffer(rows_queue_, uint8_t(tiling.buffers), uint32_t(tiling.chunk));
    pipe_.InitBuffer(map_buffer_, kMapTile * sizeof(int32_t));
    pipe_.InitBuffer(fill_buffer_, 2 * uint32_t(tiling.chunk));
    slots_ = map_buffer_.Get<int32_t>();
    zeros_ = fill_buffer_.Get<uint8_t>();
    ones_ = zeros_[uint32_t(tiling.chunk)];
  }

  __aicore__ inline void run() {
    Duplicate(zeros_.ReinterpretCast<int32_t>(), 0, tiling_.chunk / 4);
    Duplicate(ones_.ReinterpretCast<int32_t>(), -1, tiling_.chunk / 4);
    hand_over<HardEvent::V_MTE3>(pipe_);
    for_slots(pipe_, map_, slots_, tiling_.rows, [&](int64_t row, int32_t slot) { write_row(row, slot); });
  }

 private:
  __aicore__ inline void write_row(int64_t row, int64_t slot) {
    const bool valid = slot >= 0 && slot < tiling_.tokens * tiling_.topk;
    for (int64_t at = 0; at < tiling_.row_bytes; at += tiling_.chunk) {
      const int64_t left = tiling_.row_bytes - at;
      DataCopyExtParams params;
      params.blockLen = uint32_t(left < tiling_.chunk ? left : tiling_.chunk);
      const GlobalTensor<uint8_t> out = out_[uint64_t(row * tiling_.row_bytes + at)];
      if (!valid) {
        DataCopyPad(out, slot == -1 ? zeros_ : ones_, params);
        continue;
      }
      LocalTensor<uint8_t> bytes = rows_queue_.AllocTensor<uint8_t>();
      const int64_t from = slot / tiling_.topk * tiling_.row_stride + at;
      DataCopyPad(bytes, x_[uint64_t(from)], params, DataCopyPadExtParams<uint8_t>{});
      rows_queue_.EnQue(bytes);
      bytes = rows_queue_.DeQue<uint8_t>();
      DataCopyPad(out, bytes, params);
      rows_queue_.FreeTensor(bytes);
    }
  }

  const PermuteTiling& tiling_;
  TPipe pipe_;
  GlobalTensor<uint8_t> x_, out_;
  GlobalTensor<int32_t> map_;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 4> rows_queue_;
  TBuf<TPosition::VECCALC> map_buffer_, fill_buffer_;
  LocalTensor<int32_t> slots_;
  LocalTensor<uint8_t> zeros_, ones_;
};

template <typename Config>
__aicore__ inline void moe_permute(GM_ADDR x, GM_ADDR map, GM_ADDR out, const PermuteTiling& tiling) {
  Permute kernel(x, map, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
