// RMSNorm of short rows that lie side by side on the core: all of them by the same instructions, a repeat a row. What
// norm_kernel.h and rope_kernel.h do alike, to the bit. Include from kernel files only.
#pragma once

#include "groups.h"
#include "norm_tiling.h"

namespace deepinfer::npu {

// Floats of a row on the core, so that its blocks can be counted by the strides of an instruction.
constexpr int32_t kLongestShortRow = kMostRepeats * kLanesOfBlock;

// A weight, or chunks of it, as floats: 1 + w for one_plus, zeros behind the last.
template <typename W, WeightForm form>
class RowWeights {
 public:
  __aicore__ inline void init(TPipe& pipe, GM_ADDR data, int64_t bytes, int32_t pitch) {
    pitch_ = pitch;
    data_.SetGlobalBuffer((__gm__ Bits<W>*)data, uint64_t(bytes) / sizeof(W));
    pipe.InitBuffer(queue_, 1, uint32_t(pitch) * sizeof(W));
    pipe.InitBuffer(buffer_, uint32_t(pitch) * sizeof(float));
    values_ = buffer_.template Get<float>();
  }

  __aicore__ inline void load(int64_t begin, int32_t size) {
    LocalTensor<Bits<W>> raw = queue_.template AllocTensor<Bits<W>>();
    DataCopyExtParams params;
    params.blockLen = uint32_t(size) * uint32_t(sizeof(W));
    DataCopyPad(raw, data_[uint64_t(begin)], params, DataCopyPadExtParams<Bits<W>>{});
    queue_.EnQue(raw);
    raw = queue_.template DeQue<Bits<W>>();
    Duplicate(values_, 0.0f, pitch_);
    PipeBarrier<PIPE_V>();
    widen(values_, raw.template ReinterpretCast<W>(), size);
    queue_.FreeTensor(raw);
    PipeBarrier<PIPE_V>();
    if constexpr (form == WeightForm::one_plus) {
      Adds(values_, values_, 1.0f, pitch_);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline const LocalTensor<float>& values() const { return values_; }

 private:
  int32_t pitch_ = 0;
  GlobalTensor<Bits<W>> data_;
  TQue<TPosition::VECIN, 1> queue_;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<float> values_;
};

// Rows of `pitch` floats, zeros behind the last of `size`, times 1 / sqrt(mean(x^2) + eps). `squares` is as large as the
// values, `small` has row_norm_bytes(count).
__aicore__ inline void normalize_rows(const LocalTensor<float>& values, const LocalTensor<float>& squares,
                                      const LocalTensor<float>& small, int32_t count, int32_t pitch, int32_t size,
                                      float eps) {
  const int32_t n = up_to_repeats(count), step = pitch / kLanesOfBlock;
  const LocalTensor<float> sums = small, ones = small[uint32_t(n)], spread_out = small[uint32_t(n * kLanesOfBlock)];
  Mul(squares, values, values, count * pitch);
  Duplicate(small, 1.0f, 2 * n);
  PipeBarrier<PIPE_V>();
  int32_t width = pitch;
  while (width > kLanesOfRepeat) {
    const int32_t lower = whole_blocks<float>((width + 1) / 2);
    const BinaryRepeatParams strides(1, 1, 1, uint8_t(step), uint8_t(step), uint8_t(step));
    for_columns(count, width - lower, [&](int32_t row, int32_t rows, int32_t column, int32_t lanes) {
      const LocalTensor<float> to = squares[uint32_t(row * pitch + column)];
      Add(to, to, to[uint32_t(lower)], uint64_t(lanes), uint8_t(rows), strides);
    });
    PipeBarrier<PIPE_V>();
    width = lower;
  }
  for_columns(count, width, [&](int32_t row, int32_t rows, int32_t, int32_t lanes) {
    WholeReduceSum(sums[uint32_t(row)], squares[uint32_t(row * pitch)], lanes, rows, 1, 1, step);
  });
  PipeBarrier<PIPE_V>();
  Duplicate(squares, float(size), n);
  PipeBarrier<PIPE_V>();
  Div(sums, sums, squares, n);
  PipeBarrier<PIPE_V>();
  Adds(sums, sums, eps, n);
  PipeBarrier<PIPE_V>();
  Sqrt(sums, sums, n);
  PipeBarrier<PIPE_V>();
  Div(sums, ones, sums, n);
  PipeBarrier<PIPE_V>();
  spread(spread_out, sums, n);
  PipeBarrier<PIPE_V>();
  scale_groups(values, spread_out, count, pitch);
  PipeBarrier<PIPE_V>();
}

// Normed rows of any length, `weight` as floats (of one_plus: one more), to `out` with the roundings of the model's own
// code. Of each row `width` floats, whole blocks.
template <WeightForm form, typename X, typename Out>
__aicore__ inline void weigh_rows(const LocalTensor<Out>& out, const LocalTensor<float>& values,
                                  const LocalTensor<float>& weight, int32_t count, int32_t width, int32_t pitch) {
  const int32_t elements = (count - 1) * pitch + width;
  if constexpr (form == WeightForm::cast_mul && sizeof(X) < sizeof(float)) {
    const LocalTensor<X> rounded = out.template ReinterpretCast<X>();
    narrow(rounded, values, elements);
    PipeBarrier<PIPE_V>();
    widen(values, rounded, elements);
    PipeBarrier<PIPE_V>();
  }
  if constexpr (form != WeightForm::none) {
    if (pitch <= kLongestShortRow) {
      times_row(values, pitch, values, pitch, weight, count, width);
    } else {
      for (int32_t i = 0; i < count; ++i) {
        const LocalTensor<float> row = values[uint32_t(i * pitch)];
        Mul(row, row, weight, width);
      }
    }
    PipeBarrier<PIPE_V>();
  }
  narrow(out, values, elements);
}

}  // namespace deepinfer::npu
