// Element types and rows for the Ascend C kernels. Include from kernel files only.
#pragma once

#include <kernel_operator.h>

#include "../cpu/types.h"

namespace deepinfer::npu {

using namespace AscendC;

template <DType dtype>
struct ElementOf;
template <>
struct ElementOf<DType::f32> {
  using type = float;
};
template <>
struct ElementOf<DType::bf16> {
  using type = bfloat16_t;
};
template <>
struct ElementOf<DType::f16> {
  using type = half;
};
template <DType dtype>
using Element = typename ElementOf<dtype>::type;

// Copies move bits: padding is the zero of an integer.
template <int bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = uint8_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<4> {
  using type = uint32_t;
};
template <typename T>
using Bits = typename BitsOf<sizeof(T)>::type;

// Indices are int32 or int64.
template <bool wide>
struct WideOf {
  using type = int32_t;
};
template <>
struct WideOf<true> {
  using type = int64_t;
};
template <bool wide>
using Wide = typename WideOf<wide>::type;

// An integer that vectors add, to copy elements to the bit.
template <int bytes>
struct SignedOf {
  using type = int32_t;
};
template <>
struct SignedOf<2> {
  using type = int16_t;
};
template <int bytes>
using SignedBits = typename SignedOf<bytes>::type;

constexpr int64_t kLongestGap = 0xffffffff;  // between the pieces of a copy, in bytes
constexpr int32_t kBlockBytes = 32;  // of the unified buffer: what copies and vectors are aligned to

template <typename T>
__aicore__ inline int32_t whole_blocks(int32_t elements) {
  constexpr int32_t block = kBlockBytes / int32_t(sizeof(T));
  return (elements + block - 1) / block * block;
}

// Later instructions of the second pipe of the event follow all earlier ones of the first.
template <HardEvent event>
__aicore__ inline void hand_over(TPipe& pipe) {
  const int8_t id = pipe.AllocEventID<event>();
  SetFlag<event>(id);
  WaitFlag<event>(id);
  pipe.ReleaseEventID<event>(id);
}

__aicore__ inline int64_t row_offset(const Rows& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.dims - 1; d >= 0; --d) {
    offset += row % rows.sizes[d] * rows.strides[d];
    row /= rows.sizes[d];
  }
  return offset;
}

// Rows of a strided tensor, from global memory. On the core they lie `pitch` elements apart; what is left of a row's
// last block is zero.
template <typename T>
class RowReader {
 public:
  __aicore__ inline void init(GM_ADDR data, int64_t bytes, const Rows& rows) {
    data_.SetGlobalBuffer((__gm__ Bits<T>*)data, uint64_t(bytes) / sizeof(T));
    rows_ = &rows;
  }

  // Elements [begin, begin + size) of `count` rows.
  __aicore__ inline void read(const LocalTensor<T>& to, int64_t row, int32_t count, int64_t begin, int32_t size,
                              int32_t pitch) const {
    const LocalTensor<Bits<T>> bits = to.template ReinterpretCast<Bits<T>>();
    const int64_t stride = rows_->dims == 1 ? rows_->strides[0] : 0;
    const int64_t gap = (stride - size) * int64_t(sizeof(T));
    if (count > 1 && rows_->dims == 1 && gap >= 0 && gap <= kLongestGap) {
      move(bits, row * stride + begin, count, size, uint32_t(gap), pitch);
    } else {
      for (int32_t i = 0; i < count; ++i)
        move(bits[uint32_t(i * pitch)], row_offset(*rows_, row + i) + begin, 1, size, 0, pitch);
    }
  }

  // `count` pieces of `size` elements, `stride` elements from one to the next, the first `begin` elements after a row.
  __aicore__ inline void read_block(const LocalTensor<T>& to, int64_t row, int64_t begin, int32_t count, int64_t stride,
                                    int32_t size, int32_t pitch) const {
    const LocalTensor<Bits<T>> bits = to.template ReinterpretCast<Bits<T>>();
    const int64_t offset = row_offset(*rows_, row) + begin, gap = (stride - size) * int64_t(sizeof(T));
    if (count == 1) {
      move(bits, offset, 1, size, 0, pitch);
    } else if (gap >= 0 && gap <= kLongestGap) {
      move(bits, offset, count, size, uint32_t(gap), pitch);
    } else {
      for (int32_t i = 0; i < count; ++i) move(bits[uint32_t(i * pitch)], offset + i * stride, 1, size, 0, pitch);
    }
  }

 private:
  __aicore__ inline void move(const LocalTensor<Bits<T>>& to, int64_t offset, int32_t count, int32_t size, uint32_t gap,
                              int32_t pitch) const {
    DataCopyExtParams params;
    params.blockCount = uint16_t(count);
    params.blockLen = uint32_t(size) * uint32_t(sizeof(T));
    params.srcStride = gap;
    params.dstStride = uint32_t(pitch - whole_blocks<T>(size)) * uint32_t(sizeof(T)) / kBlockBytes;
    DataCopyPadExtParams<Bits<T>> padding;
    padding.isPad = true;
    padding.rightPadding = uint8_t(whole_blocks<T>(size) - size);
    padding.paddingValue = 0;
    DataCopyPad(to, data_[uint64_t(offset)], params, padding);
  }

  GlobalTensor<Bits<T>> data_;
  const Rows* rows_ = nullptr;
};

// Dense rows of `width` elements, to global memory.
template <typename T>
class RowWriter {
 public:
  __aicore__ inline void init(GM_ADDR data, int64_t bytes, int64_t width) {
    data_.SetGlobalBuffer((__gm__ Bits<T>*)data, uint64_t(bytes) / sizeof(T));
    width_ = width;
  }

  __aicore__ inline void write(const LocalTensor<T>& from, int64_t row, int32_t count, int64_t begin, int32_t size,
                               int32_t pitch) const {
    DataCopyExtParams params;
    params.blockCount = uint16_t(count);
    params.blockLen = uint32_t(size) * uint32_t(sizeof(T));
    params.srcStride = uint32_t(pitch - whole_blocks<T>(size)) * uint32_t(sizeof(T)) / kBlockBytes;
    params.dstStride = uint32_t(width_ - size) * uint32_t(sizeof(T));
    DataCopyPad(data_[uint64_t(row * width_ + begin)], from.template ReinterpretCast<Bits<T>>(), params);
  }

  // As RowReader's.
  __aicore__ inline void write_block(const LocalTensor<T>& from, int64_t row, int64_t begin, int32_t count,
                                     int64_t stride, int32_t size, int32_t pitch) const {
    const LocalTensor<Bits<T>> bits = from.template ReinterpretCast<Bits<T>>();
    const int64_t gap = (stride - size) * int64_t(sizeof(T));
    const bool together = count == 1 || gap <= kLongestGap;
    DataCopyExtParams params;
    params.blockCount = uint16_t(together ? count : 1);
    params.blockLen = uint32_t(size) * uint32_t(sizeof(T));
    params.srcStride = uint32_t(pitch - whole_blocks<T>(size)) * uint32_t(sizeof(T)) / kBlockBytes;
    params.dstStride = together && count > 1 ? uint32_t(gap) : 0;
    for (int32_t i = 0; i < count; i += params.blockCount)
      DataCopyPad(data_[uint64_t(row * width_ + begin + i * stride)], bits[uint32_t(i * pitch)], params);
  }

 private:
  GlobalTensor<Bits<T>> data_;
  int64_t width_ = 0;
};

// Rows to a strided tensor.
template <typename T>
class StridedWriter {
 public:
  __aicore__ inline void init(GM_ADDR data, int64_t bytes, const Rows& rows) {
    data_.SetGlobalBuffer((__gm__ Bits<T>*)data, uint64_t(bytes) / sizeof(T));
    rows_ = &rows;
  }

  __aicore__ inline void write(const LocalTensor<T>& from, int64_t row, int32_t count, int64_t begin, int32_t size,
                               int32_t pitch) const {
    const LocalTensor<Bits<T>> bits = from.template ReinterpretCast<Bits<T>>();
    const int64_t stride = rows_->dims == 1 ? rows_->strides[0] : 0, gap = (stride - size) * int64_t(sizeof(T));
    const bool together = count > 1 && gap >= 0 && gap <= kLongestGap;
    DataCopyExtParams params;
    params.blockCount = uint16_t(together ? count : 1);
    params.blockLen = uint32_t(size) * uint32_t(sizeof(T));
    params.srcStride = uint32_t(pitch - whole_blocks<T>(size)) * uint32_t(sizeof(T)) / kBlockBytes;
    params.dstStride = together ? uint32_t(gap) : 0;
    for (int32_t i = 0; i < count; i += params.blockCount)
      DataCopyPad(data_[uint64_t(row_offset(*rows_, row + i) + begin)], bits[uint32_t(i * pitch)], params);
  }

 private:
  GlobalTensor<Bits<T>> data_;
  const Rows* rows_ = nullptr;
};

// Folds `size` values to at most 64, the upper half onto the lower one, and returns how many are left. The order depends
// on the size alone.
template <bool maximum>
__aicore__ inline int32_t fold(const LocalTensor<float>& values, int32_t size) {
  constexpr int32_t kLanes = 64;  // floats of a repeat
  while (size > kLanes) {
    const int32_t lower = whole_blocks<float>((size + 1) / 2);
    const LocalTensor<float> upper = values[uint32_t(lower)];
    if constexpr (maximum) Max(values, values, upper, size - lower);
    else Add(values, values, upper, size - lower);
    PipeBarrier<PIPE_V>();
    size = lower;
  }
  return size;
}

// Exact: to float, in which all kernels compute.
template <typename T>
__aicore__ inline void widen(const LocalTensor<float>& to, const LocalTensor<T>& from, int32_t count) {
  if constexpr (sizeof(T) == sizeof(float)) Muls(to, from, 1.0f, count);
  else Cast(to, from, RoundMode::CAST_NONE, uint32_t(count));
}

// To nearest, ties to even.
template <typename T>
__aicore__ inline void narrow(const LocalTensor<T>& to, const LocalTensor<float>& from, int32_t count) {
  if constexpr (sizeof(T) == sizeof(float)) Muls(to, from, 1.0f, count);
  else Cast(to, from, RoundMode::CAST_RINT, uint32_t(count));
}

}  // namespace deepinfer::npu
