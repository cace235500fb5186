// Top-k of each row. Rows are dealt to the vector cores.
//
// A row streams by in chunks, once: what is above the level of the k greatest so far joins a list of candidates, and when
// that is full a selection leaves k of them and raises the level (topk_list.h). A chunk takes one comparison and one
// compression, so long rows are bound by memory; short ones by the bisections of their selection. The list is in the order
// of the indices, which is what the op returns; descending order takes a sort of the k, by Sort32 and MrgSort.
//
// What the core has no room for is found in windows of ranks, each in a pass of its own over what follows the window
// before. In descending order each window goes out as it is found; otherwise one more pass copies all up to the last.
//
// Config: `x` (DType), `wide` (int: 64-bit indices), `sorted`, `values`, `table` (int: whether).
#pragma once

#include "topk_list.h"

namespace deepinfer::npu {

template <typename C>
class Topk : private TopkList<C::x> {
  using List = TopkList<C::x>;
  using T = Element<C::x>;
  using B = Bits<T>;
  using Index = Wide<C::wide != 0>;
  using typename List::Boundary;
  using typename List::Level;
  using List::compress, List::count_, List::index_, List::keep_, List::keys_, List::list_, List::now_, List::pipe_,
      List::places_;
  static constexpr bool kStaged = C::wide || C::table;  // indices go through the scalar unit
  static constexpr int32_t kGroup = 32;                 // of Sort32

 public:
  __aicore__ inline Topk(GM_ADDR x, GM_ADDR lengths, GM_ADDR offsets, GM_ADDR table, GM_ADDR values, GM_ADDR indices,
                         const TopkTiling& tiling)
      : tiling_(tiling) {
    x_.init(x, tiling.x_bytes, tiling.rows);
    values_.SetGlobalBuffer((__gm__ B*)values, uint64_t(tiling.values_bytes) / sizeof(B));
    indices_.SetGlobalBuffer((__gm__ Index*)indices, uint64_t(tiling.indices_bytes) / sizeof(Index));
    if (tiling.lengths) lengths_.SetGlobalBuffer((__gm__ int32_t*)lengths, uint64_t(tiling.row_bytes) / 4);
    if (tiling.offsets) offsets_.SetGlobalBuffer((__gm__ int32_t*)offsets, uint64_t(tiling.row_bytes) / 4);
    if constexpr (C::table) table_.SetGlobalBuffer((__gm__ int32_t*)table, uint64_t(tiling.table_bytes) / 4);
    if constexpr (C::sorted) {  // first, since they lie at multiples of 256 bytes
      for (int i = 0; i < 2; ++i) {
        pipe_.InitBuffer(pair_buffer_[i], uint32_t(tiling.window) * 2 * sizeof(float));
        pairs_[i] = pair_buffer_[i].template Get<float>();
      }
    }
    List::init_list(tiling);
    pipe_.InitBuffer(chunk_queue_, 2, uint32_t(tiling.chunk) * sizeof(B));
    if constexpr (kStaged) {
      pipe_.InitBuffer(staged_buffer_, uint32_t(longest_piece()) * sizeof(Index));
      staged_ = staged_buffer_.template Get<Index>();
    }
  }

  __aicore__ inline void run() {
    for (row_ = GetBlockIdx(); row_ < tiling_.rows.count; row_ += GetBlockNum()) {
      size_ = tiling_.row_size;
      if (tiling_.lengths) {
        const int64_t length = lengths_.GetValue(uint64_t(row_));
        size_ = length < 0 ? 0 : length < size_ ? length : size_;
      }
      offset_ = 0;
      if (tiling_.offsets) offset_ = offsets_.GetValue(uint64_t(row_));
      const int64_t found = tiling_.k < size_ ? tiling_.k : size_;
      if (C::sorted || tiling_.k < size_) by_windows(found);
      else copy_up_to(nullptr);
      fill_from(found);
    }
  }

 private:
  __aicore__ inline void by_windows(int64_t found) {
    Boundary last{};
    for (int64_t done = 0; done < found;) {
      const int32_t want = found - done < tiling_.window ? int32_t(found - done) : tiling_.window;
      last = find(want, done > 0 ? &last : nullptr);
      if constexpr (C::sorted) write_sorted(want, done);
      else if (found == want) write(list_[now_], index_[now_], want, done);
      done += want;
    }
    if (!C::sorted && found > tiling_.window) copy_up_to(&last);
  }

  // Leaves in the list the next `want` elements after a boundary, and says where they end.
  __aicore__ inline Boundary find(int32_t want, const Boundary* after) {
    Boundary last = after ? *after : Boundary{};
    List::clear();
    load(0);
    for (int64_t begin = 0; begin < size_; begin += tiling_.chunk) {
      if (begin + tiling_.chunk < size_) load(begin + tiling_.chunk);
      if (List::is_full(tiling_.chunk)) last = List::select(want);
      LocalTensor<B> chunk = chunk_queue_.template DeQue<B>();
      if (!List::settled()) List::add(chunk, begin, chunk_at(begin), after);
      chunk_queue_.FreeTensor(chunk);
    }
    if (count_ > want) last = List::select(want);
    return last;
  }

  __aicore__ inline int32_t chunk_at(int64_t begin) const {
    return size_ - begin < tiling_.chunk ? int32_t(size_ - begin) : tiling_.chunk;
  }

  __aicore__ inline void load(int64_t begin) {
    const LocalTensor<B> chunk = chunk_queue_.template AllocTensor<B>();
    x_.read(chunk.template ReinterpretCast<T>(), row_, 1, begin, chunk_at(begin), tiling_.chunk);
    chunk_queue_.EnQue(chunk);
  }

  // All elements of the row in its order, or those up to the last one of the windows.
  __aicore__ inline void copy_up_to(const Boundary* last) {
    int64_t at = 0;
    for (int64_t begin = 0; begin < size_; begin += tiling_.chunk) {
      const int32_t size = chunk_at(begin);
      load(begin);
      LocalTensor<B> chunk = chunk_queue_.template DeQue<B>();
      int32_t kept = size;
      if (last) {
        List::take_keys(chunk, size);
        List::follows(*last, begin, size);
        Not(keep_, keep_, List::words(size));
        PipeBarrier<PIPE_V>();
        kept = compress(list_[0], chunk, size);
        List::make_indices(index_[1], begin, size);
        compress(index_[0], index_[1], size);
      } else {
        List::move(list_[0], chunk, size);
        List::make_indices(index_[0], begin, size);
      }
      chunk_queue_.FreeTensor(chunk);
      if (kept > 0) write(list_[0], index_[0], kept, at);
      at += kept;
    }
  }

  // The `want` elements of the list in descending order, the first of them as element `at` of the result.
  __aicore__ inline void write_sorted(int32_t want, int64_t at) {
    // NaN come first, as they are: the sort does not know them.
    List::take_keys(list_[now_], want);
    List::below(keep_, Level{0, true}, want);
    const int32_t numbers = compress(list_[1 - now_], list_[now_], want);
    if (numbers < want) {
      const int32_t other = 1 - now_;
      compress(index_[other], index_[now_], want);
      Not(keep_, keep_, List::words(want));
      PipeBarrier<PIPE_V>();
      // The numbers wait in the other list; NaN leave through the places of the pairs.
      const LocalTensor<B> nan = pairs_[0].template ReinterpretCast<B>();
      const LocalTensor<int32_t> nan_index = pairs_[1].template ReinterpretCast<int32_t>();
      compress(nan, list_[now_], want);
      compress(nan_index, index_[now_], want);
      write(nan, nan_index, want - numbers, at);
      at += want - numbers;
      now_ = other;
      if (numbers == 0) return;
      List::take_keys(list_[now_], numbers);
    }
    sort(numbers);
    write(list_[1 - now_], index_[1 - now_], numbers, at);
  }

  // The first n of the list, all numbers, into the other list, greatest first. Equal ones stay in order.
  __aicore__ inline void sort(int32_t n) {
    const int32_t whole = (n + kGroup - 1) / kGroup * kGroup;
    Adds(keys_, keys_, 0.0f, n);  // of -0 and 0 one number
    hand_over<HardEvent::V_S>(pipe_);
    for (int32_t i = n; i < whole; ++i) keys_.SetValue(uint32_t(i), -List::infinity());
    hand_over<HardEvent::S_V>(pipe_);
    PipeBarrier<PIPE_V>();
    const LocalTensor<uint32_t> places = index_[1 - now_].template ReinterpretCast<uint32_t>();
    Cast(index_[1 - now_], places_, RoundMode::CAST_RINT, uint32_t(whole));
    PipeBarrier<PIPE_V>();
    Sort32(pairs_[0], keys_, places, whole / kGroup);
    PipeBarrier<PIPE_V>();
    int from = 0;
    for (int32_t run = kGroup; run < whole; run *= 4) {
      for (int32_t begin = 0; begin < whole; begin += 4 * run) merge(pairs_[1 - from], pairs_[from], begin, run, whole);
      PipeBarrier<PIPE_V>();
      from = 1 - from;
    }
    // From pairs to places, to distances in bytes, to elements.
    GatherMaskParams params;
    params.src0BlockStride = 1;
    params.repeatTimes = 1;
    params.src0RepeatStride = 8;
    uint64_t kept = 0;
    constexpr uint8_t kSecondOfTwo = 2;
    GatherMask(places, pairs_[from].template ReinterpretCast<uint32_t>(), kSecondOfTwo, true, uint32_t(2 * n), params,
               kept);
    PipeBarrier<PIPE_V>();
    const LocalTensor<uint32_t> distances = keys_.template ReinterpretCast<uint32_t>();
    ShiftLeft(distances, places, uint32_t(sizeof(B) == 2 ? 1 : 2), n);
    PipeBarrier<PIPE_V>();
    Gather(list_[1 - now_], list_[now_], distances, 0, uint32_t(n));
    PipeBarrier<PIPE_V>();
    ShiftLeft(distances, places, uint32_t(2), n);
    PipeBarrier<PIPE_V>();
    Gather(index_[1 - now_], index_[now_], distances, 0, uint32_t(n));
    PipeBarrier<PIPE_V>();
  }

  // Up to four runs from pair `begin` on become one.
  __aicore__ inline void merge(const LocalTensor<float>& to, const LocalTensor<float>& from, int32_t begin, int32_t run,
                               int32_t whole) {
    LocalTensor<float> runs[4];
    MrgSort4Info params;
    int32_t count = 0;
    for (int32_t at = begin; at < whole && count < 4; at += run, ++count) {
      runs[count] = from[uint32_t(2 * at)];
      params.elementLengths[count] = uint16_t(whole - at < run ? whole - at : run);
    }
    const LocalTensor<float> target = to[uint32_t(2 * begin)];
    if (count == 1) {
      Adds(target.template ReinterpretCast<int32_t>(), runs[0].template ReinterpretCast<int32_t>(), int32_t(0),
           2 * (whole - begin));
      return;
    }
    for (int32_t i = count; i < 4; ++i) runs[i] = runs[0];
    params.ifExhaustedSuspension = false;
    params.validBit = uint16_t((1 << count) - 1);
    params.repeatTimes = 1;
    MrgSortSrcList<float> sources;
    sources.src1 = runs[0];
    sources.src2 = runs[1];
    sources.src3 = runs[2];
    sources.src4 = runs[3];
    MrgSort(target, sources, params);
  }

  // n elements and their indices, as elements `at` and on of the row's result.
  __aicore__ inline void write(const LocalTensor<B>& list, const LocalTensor<int32_t>& index, int32_t n, int64_t at) {
    if constexpr (kStaged) {
      hand_over<HardEvent::V_S>(pipe_);
      for (int32_t i = 0; i < n; ++i) staged_.SetValue(uint32_t(i), place_of(index.GetValue(uint32_t(i))));
      hand_over<HardEvent::S_V>(pipe_);
      hand_over<HardEvent::S_MTE3>(pipe_);
    } else if (offset_ != 0) {
      Adds(index, index, int32_t(offset_), n);
    }
    hand_over<HardEvent::V_MTE3>(pipe_);
    if constexpr (C::values) copy_out(values_, list, n, at);
    if constexpr (kStaged) {
      copy_out(indices_, staged_, n, at);
      hand_over<HardEvent::MTE3_S>(pipe_);
    } else {
      copy_out(indices_, index, n, at);
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  // Where element `index` of the row is for the caller.
  __aicore__ inline Index place_of(int64_t index) const {
    if constexpr (C::table) {
      const int64_t page = table_.GetValue(uint64_t(row_ * tiling_.pages + index / tiling_.page_size));
      if (page < 0) return Index(tiling_.fill_index);
      index = page * tiling_.page_size + index % tiling_.page_size;
    }
    return Index(index + offset_);
  }

  template <typename V>
  __aicore__ inline void copy_out(const GlobalTensor<V>& to, const LocalTensor<V>& from, int32_t n, int64_t at) const {
    DataCopyExtParams params;
    params.blockLen = uint32_t(n) * uint32_t(sizeof(V));
    DataCopyPad(to[uint64_t(row_ * tiling_.k + at)], from, params);
  }

  __aicore__ inline int32_t longest_piece() const {
    return tiling_.window > tiling_.chunk ? tiling_.window : tiling_.chunk;
  }

  // What a row has no elements for.
  __aicore__ inline void fill_from(int64_t found) {
    if (found == tiling_.k) return;
    const int32_t most = longest_piece();
    Duplicate(keys_, tiling_.fill_value, most);
    PipeBarrier<PIPE_V>();
    narrow(list_[0].template ReinterpretCast<T>(), keys_, most);
    if constexpr (kStaged) {
      for (int32_t i = 0; i < most; ++i) staged_.SetValue(uint32_t(i), Index(tiling_.fill_index));
      hand_over<HardEvent::S_MTE3>(pipe_);
    } else {
      Duplicate(index_[0], int32_t(tiling_.fill_index), most);
    }
    hand_over<HardEvent::V_MTE3>(pipe_);
    for (int64_t at = found; at < tiling_.k; at += most) {
      const int32_t n = tiling_.k - at < most ? int32_t(tiling_.k - at) : most;
      if constexpr (C::values) copy_out(values_, list_[0], n, at);
      if constexpr (kStaged) copy_out(indices_, staged_, n, at);
      else copy_out(indices_, index_[0], n, at);
    }
    if constexpr (kStaged) hand_over<HardEvent::MTE3_S>(pipe_);
    hand_over<HardEvent::MTE3_V>(pipe_);
    PipeBarrier<PIPE_V>();
  }

  const TopkTiling& tiling_;
  RowReader<T> x_;
  GlobalTensor<int32_t> lengths_, offsets_, table_;
  GlobalTensor<B> values_;
  GlobalTensor<Index> indices_;
  TQue<TPosition::VECIN, 2> chunk_queue_;
  TBuf<TPosition::VECCALC> staged_buffer_, pair_buffer_[2];
  LocalTensor<Index> staged_;
  LocalTensor<float> pairs_[2];
  int64_t row_ = 0, size_ = 0, offset_ = 0;
};

template <typename Config>
__aicore__ inline void topk(GM_ADDR x, GM_ADDR lengths, GM_ADDR offsets, GM_ADDR table, GM_ADDR values,
                            GM_ADDR indices, const TopkTiling& tiling) {
  Topk<Config> kernel(x, lengths, offsets, table, values, indices, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
