// The candidates of one row of a top-k: their very bits and their indices, in the order of the indices.
//
// Elements are compared as floats, NaN above all numbers: each question is asked as "below" or "not above", which NaN
// answers with no. So -0 equals 0, and no element is changed. A selection bisects the values between -infinity and
// infinity, in the order of their bits, for the greatest level that enough candidates reach; of those that equal it the
// first are kept. That takes at most 32 comparisons and counts of the list, 16 for bfloat16, and sorts nothing.
#pragma once

#include "rows.h"
#include "topk_tiling.h"

namespace deepinfer::npu {

template <DType dtype>
class TopkList {
 protected:
  using T = Element<dtype>;
  using B = Bits<T>;

  struct Level {
    float value;
    bool nan;  // above all numbers instead
  };
  // The last element of those that come first: what follows is below the level, or equal and of a higher index.
  struct Boundary {
    Level level;
    int64_t index;
  };

  static constexpr int32_t kUnit = TopkTiling::kUnit;
  static constexpr int64_t kNone = 0x7fffffff;

  __aicore__ inline void init_list(const TopkTiling& tiling) {
    const uint32_t room = uint32_t(tiling.room);
    room_ = tiling.room;
    // What is sorted lies at multiples of 128 bytes.
    pipe_.InitBuffer(keys_buffer_, room * sizeof(float));
    pipe_.InitBuffer(index_buffer_[0], room * sizeof(int32_t));
    pipe_.InitBuffer(index_buffer_[1], room * sizeof(int32_t));
    pipe_.InitBuffer(places_buffer_, room * sizeof(float));
    pipe_.InitBuffer(list_buffer_[0], room * sizeof(B));
    pipe_.InitBuffer(list_buffer_[1], room * sizeof(B));
    pipe_.InitBuffer(keep_buffer_, room / 8);
    pipe_.InitBuffer(low_buffer_, room / 8);
    pipe_.InitBuffer(high_buffer_, room / 8);
    keys_ = keys_buffer_.template Get<float>();
    places_ = places_buffer_.template Get<float>();
    for (int i = 0; i < 2; ++i) {
      list_[i] = list_buffer_[i].template Get<B>();
      index_[i] = index_buffer_[i].template Get<int32_t>();
    }
    keep_ = keep_buffer_.template Get<uint16_t>();
    low_ = low_buffer_.template Get<uint16_t>();
    high_ = high_buffer_.template Get<uint16_t>();
    // 0, 1, 2...: places in a list or chunk. Comparisons take whole units of keys, so that none may be undefined.
    Duplicate(keys_, 0.0f, room_);
    for (int32_t i = 0; i < kUnit; ++i) places_.SetValue(uint32_t(i), float(i));
    hand_over<HardEvent::S_V>(pipe_);
    for (int32_t size = kUnit; size < room_; size *= 2) {
      Adds(places_[uint32_t(size)], places_, float(size), size < room_ - size ? size : room_ - size);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void clear() {
    count_ = now_ = 0;
    selected_ = exact_ = false;
    lowest_ = unit_of(0xff800000u);
  }
  // Whether nothing that comes later can still be selected.
  __aicore__ inline bool settled() const { return selected_ && level_.nan; }
  __aicore__ inline bool is_full(int32_t chunk) const { return round_up(count_) + chunk > room_; }

  // Those of a chunk that can be among the first, after `boundary` if there is one.
  __aicore__ inline void add(const LocalTensor<B>& chunk, int64_t begin, int32_t size, const Boundary* boundary) {
    if (!selected_ && !boundary) {  // all of them; chunks but the last are whole units
      move(list_[now_][uint32_t(count_)], chunk, size);
      make_indices(index_[now_][uint32_t(count_)], begin, size);
      count_ += size;
      return;
    }
    take_keys(chunk, size);
    if (boundary) follows(*boundary, begin, size);
    if (selected_) {
      exact_ ? below(low_, level_, size) : up_to(low_, level_, size);
      Not(boundary ? low_ : keep_, low_, words(size));
      PipeBarrier<PIPE_V>();
      if (boundary) {
        And(keep_, keep_, low_, words(size));
        PipeBarrier<PIPE_V>();
      }
    }
    const int32_t at = boundary ? 0 : round_up(count_), to = boundary ? 1 - now_ : now_;
    const int32_t kept = compress(list_[to][uint32_t(at)], chunk, size);
    if (kept == 0) return;
    const LocalTensor<int32_t> indices = keys_.template ReinterpretCast<int32_t>();
    make_indices(indices, begin, size);
    compress(index_[to][uint32_t(at)], indices, size);
    hand_over<HardEvent::V_S>(pipe_);
    if (boundary) {  // the list may not have gaps, since it does not hold enough yet
      for (int32_t i = 0; i < kept; ++i) put(count_ + i, list_[to].GetValue(uint32_t(i)), index_[to].GetValue(uint32_t(i)));
      count_ += kept;
    } else {  // the gap cannot be selected: the list holds enough that comes first
      for (int32_t i = count_; i < at; ++i) put(i, kLeast, 0);
      count_ = at + kept;
    }
    hand_over<HardEvent::S_V>(pipe_);
  }

  // Leaves the first `want` of more candidates, and says where they end.
  __aicore__ inline Boundary select(int32_t want) {
    const int32_t n = count_;
    take_keys(list_[now_], n);
    level_ = level_of(want, n);
    Boundary boundary{level_, kNone};
    below(low_, level_, n);
    Not(keep_, low_, words(n));
    PipeBarrier<PIPE_V>();
    if (!exact_) {
      up_to(high_, level_, n);
      And(low_, keep_, high_, words(n));
      PipeBarrier<PIPE_V>();
      const int32_t equal = want - (n - count(high_, n));  // that are kept
      const LocalTensor<float> places = index_[1 - now_].template ReinterpretCast<float>();
      gather(places, places_, low_, n);
      hand_over<HardEvent::V_S>(pipe_);
      boundary.index = index_[now_].GetValue(uint32_t(places.GetValue(uint32_t(equal - 1))));
      const float first_left_out = places.GetValue(uint32_t(equal));
      hand_over<HardEvent::S_V>(pipe_);
      compare(low_, places_, first_left_out, CMPMODE::LT, n);
      And(keep_, keep_, low_, words(n));
      Not(high_, high_, words(n));
      PipeBarrier<PIPE_V>();
      Or(keep_, keep_, high_, words(n));
      PipeBarrier<PIPE_V>();
    }
    compress(list_[1 - now_], list_[now_], n);
    compress(index_[1 - now_], index_[now_], n);
    now_ = 1 - now_;
    count_ = want;
    selected_ = true;
    return boundary;
  }

  // keep_: those of a chunk that come after the boundary.
  __aicore__ inline void follows(const Boundary& boundary, int64_t begin, int32_t size) {
    if (begin > boundary.index) return up_to(keep_, boundary.level, size);
    below(keep_, boundary.level, size);
    if (boundary.index >= begin + size - 1) return;
    up_to(low_, boundary.level, size);
    compare(high_, places_, float(boundary.index - begin), CMPMODE::GT, size);
    And(low_, low_, high_, words(size));
    PipeBarrier<PIPE_V>();
    Or(keep_, keep_, low_, words(size));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void take_keys(const LocalTensor<B>& from, int32_t size) {
    widen(keys_, from.template ReinterpretCast<T>(), size);
    PipeBarrier<PIPE_V>();
  }

  // Elements below a level, and elements that are not above it.
  __aicore__ inline void below(const LocalTensor<uint16_t>& mask, const Level& level, int32_t size) {
    if (level.nan) compare(mask, keys_, infinity(), CMPMODE::LE, size);
    else compare(mask, keys_, level.value, CMPMODE::LT, size);
  }
  __aicore__ inline void up_to(const LocalTensor<uint16_t>& mask, const Level& level, int32_t size) {
    if (!level.nan) return compare(mask, keys_, level.value, CMPMODE::LE, size);
    Duplicate(mask, uint16_t(0xffff), words(size));
    PipeBarrier<PIPE_V>();
  }

  // Those that keep_ names.
  template <typename V>
  __aicore__ inline int32_t compress(const LocalTensor<V>& to, const LocalTensor<V>& from, int32_t size) {
    return gather(to, from, keep_, size);
  }

  __aicore__ inline void make_indices(const LocalTensor<int32_t>& to, int64_t begin, int32_t size) {
    Cast(to, places_, RoundMode::CAST_RINT, uint32_t(size));
    PipeBarrier<PIPE_V>();
    Adds(to, to, int32_t(begin), size);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void move(const LocalTensor<B>& to, const LocalTensor<B>& from, int32_t size) {
    using S = SignedBits<sizeof(B)>;
    Adds(to.template ReinterpretCast<S>(), from.template ReinterpretCast<S>(), S(0), size);
    PipeBarrier<PIPE_V>();
  }

  // Of a mask.
  static __aicore__ inline int32_t words(int32_t size) { return (size + kUnit - 1) / kUnit * (kUnit / 16); }
  static __aicore__ inline int32_t round_up(int32_t size) {
    constexpr int32_t kBlock = kBlockBytes / 2;
    return (size + kBlock - 1) / kBlock * kBlock;
  }
  static __aicore__ inline float infinity() { return float_of(0x7f800000u); }

  template <typename V>
  __aicore__ inline int32_t gather(const LocalTensor<V>& to, const LocalTensor<V>& from,
                                   const LocalTensor<uint16_t>& mask, int32_t size) {
    GatherMaskParams params;
    params.src0BlockStride = 1;
    params.repeatTimes = 1;
    params.src0RepeatStride = 8;
    params.src1RepeatStride = 8;
    uint64_t kept = 0;
    GatherMask(to, from, mask.template ReinterpretCast<Bits<V>>(), true, uint32_t(size), params, kept);
    PipeBarrier<PIPE_V>();
    return int32_t(kept);
  }

  TPipe pipe_;
  int32_t room_ = 0, count_ = 0, now_ = 0;  // the list is list_[now_] and index_[now_], up to count_
  LocalTensor<float> keys_, places_;
  LocalTensor<B> list_[2];
  LocalTensor<int32_t> index_[2];
  LocalTensor<uint16_t> keep_, low_, high_;  // a bit an element

 private:
  // What no element is below.
  static constexpr B kLeast = dtype == DType::f32 ? B(0xff800000u) : dtype == DType::bf16 ? B(0xff80u) : B(0xfc00u);
  // Bits of a float that are zero in all elements.
  static constexpr int32_t kShift = dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 16 : 13;

  static __aicore__ inline float float_of(uint32_t bits) {
    union {
      uint32_t bits;
      float value;
    } both;
    both.bits = bits;
    return both.value;
  }
  // The numbers of the element type, numbered in their order, and back.
  static __aicore__ inline int64_t unit_of(uint32_t bits) {
    return int64_t(int32_t(bits >> 31 ? bits ^ 0x7fffffffu : bits)) >> kShift;
  }
  static __aicore__ inline float value_of(int64_t unit) {
    const int64_t ordered = unit * (int64_t(1) << kShift) + (unit < 0 ? (int64_t(1) << kShift) - 1 : 0);
    const uint32_t bits = uint32_t(ordered);
    return float_of(bits >> 31 ? bits ^ 0x7fffffffu : bits);
  }

  __aicore__ inline void compare(const LocalTensor<uint16_t>& mask, const LocalTensor<float>& values, float with,
                                 CMPMODE mode, int32_t size) {
    Compares(mask.template ReinterpretCast<uint8_t>(), values, with, mode, uint32_t(words(size) * 16));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline int32_t count(const LocalTensor<uint16_t>& mask, int32_t size) {
    return gather(index_[1 - now_], keys_.template ReinterpretCast<int32_t>(), mask, size);
  }

  // The greatest level that at least `want` of the keys reach; exact_: no more do.
  __aicore__ inline Level level_of(int32_t want, int32_t n) {
    Level level{0, true};
    below(low_, level, n);
    int32_t reach = n - count(low_, n);
    exact_ = reach == want;
    if (reach >= want) return level;
    level.nan = false;
    int64_t high = unit_of(0x7f800000u) + 1;
    while (high - lowest_ > 1 && !exact_) {
      const int64_t middle = lowest_ + (high - lowest_) / 2;
      level.value = value_of(middle);
      below(low_, level, n);
      reach = n - count(low_, n);
      exact_ = reach == want;
      (reach >= want ? lowest_ : high) = middle;
    }
    level.value = value_of(lowest_);
    return level;
  }

  __aicore__ inline void put(int32_t at, B bits, int32_t index) {
    list_[now_].SetValue(uint32_t(at), bits);
    index_[now_].SetValue(uint32_t(at), index);
  }

  TBuf<TPosition::VECCALC> keys_buffer_, places_buffer_, list_buffer_[2], index_buffer_[2];
  TBuf<TPosition::VECCALC> keep_buffer_, low_buffer_, high_buffer_;
  int64_t lowest_ = 0;  // level_, numbered
  Level level_{0, false};
  bool selected_ = false, exact_ = false;
};

}  // namespace deepinfer::npu
