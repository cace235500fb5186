// A counting sort of slots by expert, in two kernels. The first counts the slots of each expert in each chunk. In the
// second every block adds up the counts, which gives it the rows where its own slots go, and places them. Block 0 also
// writes offsets and counts; the rows of padding are shared out by expert, those after the last expert by piece.
//
// Ids and rows go through the scalar unit, a few instructions a slot. A slot's number is written to its row by a copy of
// 4 bytes of its own: bound by the number of copies. The map of a batch is small beside the tokens that it sorts.
//
// Config: `wide` (int): ids are int64.
#pragma once

#include "moe_dispatch_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

// The slots of one chunk, a piece at a time.
template <typename Id>
class SlotReader {
 public:
  __aicore__ inline void init(TPipe& pipe, GM_ADDR ids, const ExpertMapTiling& tiling) {
    pipe_ = &pipe;
    tiling_ = &tiling;
    ids_.SetGlobalBuffer((__gm__ Id*)ids, uint64_t(tiling.slots));
    pipe.InitBuffer(buffer_, kSlotsAtOnce * sizeof(Id));
    piece_ = buffer_.template Get<Id>();
  }
  __aicore__ inline int64_t begin() const { return tiling_->slots * GetBlockIdx() / tiling_->chunks; }
  __aicore__ inline int64_t end() const { return tiling_->slots * (GetBlockIdx() + 1) / tiling_->chunks; }

  // Reads up to kSlotsAtOnce slots from `first` on and returns how many.
  __aicore__ inline int32_t read(int64_t first) {
    const int64_t left = end() - first;
    const int32_t count = left < kSlotsAtOnce ? int32_t(left) : kSlotsAtOnce;
    hand_over<HardEvent::S_MTE2>(*pipe_);
    DataCopyExtParams params;
    params.blockLen = uint32_t(count) * uint32_t(sizeof(Id));
    DataCopyPad(piece_, ids_[uint64_t(first)], params, DataCopyPadExtParams<Id>{});
    hand_over<HardEvent::MTE2_S>(*pipe_);
    return count;
  }

  // The local expert of a slot of the piece; -1: none, -2: an id out of range.
  __aicore__ inline int32_t expert(int32_t index) const {
    const int64_t id = piece_.GetValue(uint32_t(index));
    if (id < -1 || id >= tiling_->num_experts) return -2;
    const int64_t local = id - tiling_->first_expert;
    return id >= 0 && local >= 0 && local < tiling_->num_local_experts ? int32_t(local) : -1;
  }

 private:
  TPipe* pipe_ = nullptr;
  const ExpertMapTiling* tiling_ = nullptr;
  GlobalTensor<Id> ids_;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<Id> piece_;
};

template <typename Config>
__aicore__ inline void expert_count(GM_ADDR ids, GM_ADDR counts, const ExpertMapTiling& tiling) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  SlotReader<Wide<Config::wide != 0>> slots;
  slots.init(pipe, ids, tiling);
  const int32_t experts = int32_t(tiling.num_local_experts);
  pipe.InitBuffer(buffer, uint32_t(experts) * uint32_t(sizeof(int32_t)));
  const LocalTensor<int32_t> found = buffer.template Get<int32_t>();
  Duplicate(found, 0, experts);
  hand_over<HardEvent::V_S>(pipe);
  for (int64_t first = slots.begin(); first < slots.end();) {
    const int32_t count = slots.read(first);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t expert = slots.expert(i);
      if (expert >= 0) found.SetValue(uint32_t(expert), found.GetValue(uint32_t(expert)) + 1);
    }
    first += count;
  }
  hand_over<HardEvent::S_MTE3>(pipe);
  GlobalTensor<int32_t> out;
  out.SetGlobalBuffer((__gm__ int32_t*)counts, uint64_t(tiling.chunks * experts));
  DataCopyExtParams params;
  params.blockLen = uint32_t(experts) * uint32_t(sizeof(int32_t));
  DataCopyPad(out[uint64_t(GetBlockIdx() * experts)], found, params);
}

template <typename C>
class ExpertPlace {
  using Id = Wide<C::wide != 0>;
  static constexpr int32_t kStep = 8;  // numbers from slot to slot: each is copied from a block of its own
  static constexpr int32_t kFill = 256;

 public:
  __aicore__ inline ExpertPlace(GM_ADDR ids, GM_ADDR chunk_counts, GM_ADDR rows_to_slots, GM_ADDR slots_to_rows,
                                GM_ADDR offsets, GM_ADDR counts, const ExpertMapTiling& tiling)
      : tiling_(tiling), experts_(int32_t(tiling.num_local_experts)) {
    slots_.init(pipe_, ids, tiling);
    chunk_counts_.SetGlobalBuffer((__gm__ int32_t*)chunk_counts, uint64_t(tiling.chunks * experts_));
    rows_to_slots_.SetGlobalBuffer((__gm__ int32_t*)rows_to_slots, uint64_t(tiling.rows));
    slots_to_rows_.SetGlobalBuffer((__gm__ int32_t*)slots_to_rows, uint64_t(tiling.slots));
    offsets_.SetGlobalBuffer((__gm__ int32_t*)offsets, uint64_t(experts_) + 1);
    counts_.SetGlobalBuffer((__gm__ int32_t*)counts, uint64_t(experts_));
    const uint32_t line = uint32_t(whole_blocks<int32_t>(experts_ + 1));
    pipe_.InitBuffer(table_buffer_, 4 * line * sizeof(int32_t));
    pipe_.InitBuffer(number_buffer_, kSlotsAtOnce * (kStep + 1) * sizeof(int32_t));
    pipe_.InitBuffer(fill_buffer_, kFill * sizeof(int32_t));
    total_ = table_buffer_.template Get<int32_t>();
    cursor_ = total_[line];
    start_ = total_[2 * line];
    chunk_ = total_[3 * line];
    numbers_ = number_buffer_.template Get<int32_t>();
    rows_ = numbers_[kSlotsAtOnce * kStep];
    fill_ = fill_buffer_.template Get<int32_t>();
  }

  __aicore__ inline void run() {
    Duplicate(fill_, -1, kFill);
    hand_over<HardEvent::V_MTE3>(pipe_);
    add_counts();
    lay_out();
    place();
    pad();
  }

 private:
  // total_: slots of each expert; cursor_: those in chunks before this one.
  __aicore__ inline void add_counts() {
    Duplicate(total_, 0, experts_);
    Duplicate(cursor_, 0, experts_);
    PipeBarrier<PIPE_V>();
    DataCopyExtParams params;
    params.blockLen = uint32_t(experts_) * uint32_t(sizeof(int32_t));
    for (int64_t chunk = 0; chunk < tiling_.chunks; ++chunk) {
      hand_over<HardEvent::V_MTE2>(pipe_);
      DataCopyPad(chunk_, chunk_counts_[uint64_t(chunk * experts_)], params, DataCopyPadExtParams<int32_t>{});
      hand_over<HardEvent::MTE2_V>(pipe_);
      Add(total_, total_, chunk_, experts_);
      if (chunk < GetBlockIdx()) Add(cursor_, cursor_, chunk_, experts_);
      PipeBarrier<PIPE_V>();
    }
    hand_over<HardEvent::V_S>(pipe_);
  }

  // start_: the first row of each expert, and the end; cursor_: the row of this chunk's next slot.
  __aicore__ inline void lay_out() {
    int64_t row = 0;
    for (int32_t expert = 0; expert < experts_; ++expert) {
      const uint32_t e = uint32_t(expert);
      start_.SetValue(e, int32_t(row));
      cursor_.SetValue(e, int32_t(row) + cursor_.GetValue(e));
      const int64_t count = total_.GetValue(e);
      row += (count + tiling_.alignment - 1) / tiling_.alignment * tiling_.alignment;
    }
    start_.SetValue(uint32_t(experts_), int32_t(row));
    hand_over<HardEvent::S_MTE3>(pipe_);
    if (GetBlockIdx() != 0) return;
    DataCopyExtParams params;
    params.blockLen = uint32_t(experts_) * uint32_t(sizeof(int32_t));
    DataCopyPad(counts_, total_, params);
    params.blockLen += uint32_t(sizeof(int32_t));
    DataCopyPad(offsets_, start_, params);
  }

  __aicore__ inline void place() {
    for (int64_t first = slots_.begin(); first < slots_.end();) {
      const int32_t count = slots_.read(first);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t expert = slots_.expert(i);
        int32_t row = expert;  // -1 or -2
        if (expert >= 0) {
          row = cursor_.GetValue(uint32_t(expert));
          cursor_.SetValue(uint32_t(expert), row + 1);
        }
        rows_.SetValue(uint32_t(i), row);
        numbers_.SetValue(uint32_t(i * kStep), int32_t(first + i));
      }
      hand_over<HardEvent::S_MTE3>(pipe_);
      DataCopyExtParams params;
      params.blockLen = sizeof(int32_t);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t row = rows_.GetValue(uint32_t(i));
        if (row >= 0) DataCopyPad(rows_to_slots_[uint64_t(row)], numbers_[uint32_t(i * kStep)], params);
      }
      params.blockLen = uint32_t(count) * uint32_t(sizeof(int32_t));
      DataCopyPad(slots_to_rows_[uint64_t(first)], rows_, params);
      hand_over<HardEvent::MTE3_S>(pipe_);
      first += count;
    }
  }

  __aicore__ inline void fill(int64_t begin, int64_t end) {
    for (; begin < end; begin += kFill) {
      const int64_t left = end - begin;
      DataCopyExtParams params;
      params.blockLen = uint32_t(left < kFill ? left : kFill) * uint32_t(sizeof(int32_t));
      DataCopyPad(rows_to_slots_[uint64_t(begin)], fill_, params);
    }
  }

  __aicore__ inline void pad() {
    for (int64_t expert = GetBlockIdx(); expert < experts_; expert += GetBlockNum()) {
      const uint32_t e = uint32_t(expert);
      fill(int64_t(start_.GetValue(e)) + total_.GetValue(e), start_.GetValue(e + 1));
    }
    const int64_t end = start_.GetValue(uint32_t(experts_));
    for (int64_t begin = end + GetBlockIdx() * kFill; begin < tiling_.rows; begin += GetBlockNum() * kFill)
      fill(begin, begin + kFill < tiling_.rows ? begin + kFill : tiling_.rows);
  }

  const ExpertMapTiling& tiling_;
  int32_t experts_;
  TPipe pipe_;
  SlotReader<Id> slots_;
  GlobalTensor<int32_t> chunk_counts_, rows_to_slots_, slots_to_rows_, offsets_, counts_;
  TBuf<TPosition::VECCALC> table_buffer_, number_buffer_, fill_buffer_;
  LocalTensor<int32_t> total_, cursor_, start_, chunk_, numbers_, rows_, fill_;
};

template <typename Config>
__aicore__ inline void expert_place(GM_ADDR ids, GM_ADDR chunk_counts, GM_ADDR rows_to_slots, GM_ADDR slots_to_rows,
                                    GM_ADDR offsets, GM_ADDR counts, const ExpertMapTiling& tiling) {
  ExpertPlace<Config> kernel(ids, chunk_counts, rows_to_slots, slots_to_rows, offsets, counts, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
