// Copies between global memory and the unified buffer.
#pragma once

#include <string>

#include "tensor.h"

namespace AscendC {

struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue = {};
};

namespace detail {

constexpr int64_t kBlock = 32;
inline int64_t whole_blocks(int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

template <typename T>
void check_pieces(const DataCopyExtParams& params) {
  twin::Core& core = twin::core();
  if (params.blockCount == 0 || params.blockLen == 0) core.fail("a copy of nothing");
  if (params.blockCount > 4095) core.fail("blockCount is " + std::to_string(params.blockCount) + ", at most 4095");
  if (params.blockLen >= 1u << 21) core.fail("blockLen is " + std::to_string(params.blockLen) + ", at most 2097151");
  if (params.blockLen % sizeof(T)) core.fail("blockLen is not a multiple of the element");
}

}  // namespace detail

// Each piece is padded to whole blocks of 32 bytes on the core.
template <typename T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding) {
  twin::Core& core = twin::core();
  core.name_instruction("DataCopyPad to the core");
  detail::check_pieces<T>(params);
  const int64_t left = padding.leftPadding * int64_t(sizeof(T)), right = padding.rightPadding * int64_t(sizeof(T));
  if (left > 32 || right > 32) core.fail("more than 32 bytes of padding on one side");
  const int64_t width = detail::whole_blocks(left + params.blockLen + right);
  twin::Copy copy{false, to.space(), nullptr, to.offset(), params.blockCount, params.blockLen, 0, 0};
  copy.global_step = int64_t(params.blockLen) + params.srcStride;
  copy.local_step = width + int64_t(params.dstStride) * detail::kBlock;
  copy.pad_left = left;
  copy.pad_right = width - left - params.blockLen;
  if (padding.isPad) {
    copy.fill_size = int(sizeof(T));
    std::memcpy(&copy.fill, &padding.paddingValue, sizeof(T));
  }
  copy.global = from.bytes(0, uint64_t((copy.pieces - 1) * copy.global_step + copy.length));
  to.require(size_t((copy.pieces - 1) * copy.local_step + width), 32);
  core.copy(twin::kMTE2, "DataCopyPad to the core", copy);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& params) {
  twin::Core& core = twin::core();
  core.name_instruction("DataCopyPad from the core");
  detail::check_pieces<T>(params);
  twin::Copy copy{true, from.space(), nullptr, from.offset(), params.blockCount, params.blockLen, 0, 0};
  copy.global_step = int64_t(params.blockLen) + params.dstStride;
  copy.local_step = detail::whole_blocks(params.blockLen) + int64_t(params.srcStride) * detail::kBlock;
  copy.global = to.bytes(0, uint64_t((copy.pieces - 1) * copy.global_step + copy.length));
  from.require(size_t((copy.pieces - 1) * copy.local_step + copy.length), 32);
  core.copy(twin::kMTE3, "DataCopyPad from the core", copy);
}

// Dense elements, whole blocks of 32 bytes.
template <typename T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
  twin::core().name_instruction("DataCopy to the core");
  if (count * sizeof(T) % detail::kBlock) twin::core().fail("the length is not a multiple of 32 bytes");
  DataCopyExtParams params;
  params.blockLen = uint32_t(count * sizeof(T));
  DataCopyPad(to, from, params, DataCopyPadExtParams<T>{});
}
template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
  twin::core().name_instruction("DataCopy from the core");
  if (count * sizeof(T) % detail::kBlock) twin::core().fail("the length is not a multiple of 32 bytes");
  DataCopyExtParams params;
  params.blockLen = uint32_t(count * sizeof(T));
  DataCopyPad(to, from, params);
}

}  // namespace AscendC
