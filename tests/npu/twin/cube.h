// The path of matrices: global memory, L1, L0A and L0B, the matrix unit, L0C, and back.
//
// Layouts are of fractals, 16 rows of 32 bytes. L1 holds Nz: columns of fractals one after the other. L0A holds rows of
// fractals (Zz) on dav-2201 and columns of them (Nz) on dav-3510; L0B rows of transposed ones (Zn). L0C holds columns of
// fractals of 16 x 16 floats.
#pragma once

#include <type_traits>

#include "tensor.h"

namespace AscendC {

struct Nd2NzParams {
  uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0;
  uint16_t dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;
};

struct LoadData2DParams {
  uint16_t startIndex = 0, dstGap = 0, srcStride = 0;
  bool ifTranspose = false;
  uint8_t repeatTimes = 0, sid = 0, addrMode = 0;
};

struct LoadData2DParamsV2 {
  uint32_t mStartPosition = 0, kStartPosition = 0;
  uint16_t mStep = 0, kStep = 0;
  int32_t srcStride = 0;
  uint16_t dstStride = 0;
  bool ifTranspose = false;
  uint8_t sid = 0;
};

struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  uint8_t unitFlag = 0;
  bool kDirectionAlign = false, cmatrixSource = false, cmatrixInitVal = true;
  bool disableGemv = false;  // dav-3510 only
};

enum class QuantMode_t { NoQuant, F322F16, F322BF16 };
enum class CO2Layout : uint8_t { NZ, ROW_MAJOR, COLUMN_MAJOR };

struct FixpipeParamsV220 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  bool reluEn = false;
  uint8_t unitFlag = 0;
};

struct Nz2NdParams {
  uint16_t ndNum = 1, srcNdStride = 0;
  uint32_t dstNdStride = 0;
};

template <CO2Layout format = CO2Layout::ROW_MAJOR>
struct FixpipeParamsArch3510 {
  static_assert(format == CO2Layout::ROW_MAJOR, "other layouts are not modelled");
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  bool reluEn = false;
  uint8_t unitFlag = 0;
  Nz2NdParams params;
};

struct FixpipeConfig {
  CO2Layout format;
};
constexpr FixpipeConfig CFG_ROW_MAJOR{CO2Layout::ROW_MAJOR};

namespace detail {

constexpr int64_t kC0Bytes = 32, kFractalBytes = 512, kEdge = 16;

// How a matrix lies in a memory of the core, without its element type.
struct Matrix {
  twin::Space space;
  size_t offset, bytes;
};

template <typename T>
Matrix matrix(const LocalTensor<T>& tensor) {
  return {tensor.space(), tensor.offset(), tensor.bytes()};
}

void nd2nz(const Matrix& to, char* from, int64_t item, const Nd2NzParams& params);
int64_t source_elements(const Nd2NzParams& params);  // from the first to the last, both included
void load(const Matrix& to, const Matrix& from, int64_t item, const LoadData2DParams& params);
void load(const Matrix& to, const Matrix& from, int64_t item, const LoadData2DParamsV2& params);

using ToFloat = void (*)(const char* from, float* to, int64_t count);
void multiply(const Matrix& c, const Matrix& a, const Matrix& b, int64_t item, ToFloat widen, const MmadParams& params);

using FromFloat = void (*)(const float* from, char* to, int64_t count);
struct Result {
  int64_t rows, columns, source_stride, target_stride;
};
void write_out(char* to, int64_t item, const Matrix& from, FromFloat narrow, const Result& result);

template <typename T>
void widen(const char* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = twin::to_float(reinterpret_cast<const T*>(from)[i]);
}
template <typename T>
void narrow(const float* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) reinterpret_cast<T*>(to)[i] = twin::from_float<T>(from[i]);
}

template <typename T>
void fixpipe(const GlobalTensor<T>& to, const LocalTensor<float>& from, int arch, int64_t n, int64_t m,
             int64_t source_stride, int64_t target_stride, QuantMode_t mode) {
  twin::Core& core = twin::core();
  core.name_instruction("Fixpipe");
  if (core.arch().number != arch) core.fail("these are the parameters of another chip");
  constexpr QuantMode_t kNeeded = std::is_same_v<T, float>  ? QuantMode_t::NoQuant
                                  : std::is_same_v<T, half> ? QuantMode_t::F322F16
                                                            : QuantMode_t::F322BF16;
  if (mode != kNeeded) core.fail("this conversion does not give this element type");
  if (n < 1 || n > 4095) core.fail("nSize is " + std::to_string(n) + ", from 1 to 4095");
  if (m < 1 || m > 8192) core.fail("mSize is " + std::to_string(m) + ", from 1 to 8192");
  if (m > 1 && target_stride < n) core.fail("rows of the result overlap");
  char* address = to.bytes(0, uint64_t((m - 1) * target_stride + n) * sizeof(T));
  write_out(address, sizeof(T), matrix(from), narrow<T>, {m, n, source_stride, target_stride});
}

}  // namespace detail

template <typename T, bool small = false>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, const Nd2NzParams& params) {
  static_assert(!small, "not modelled");
  twin::core().name_instruction("DataCopy to L1");
  detail::nd2nz(detail::matrix(to), from.bytes(0, uint64_t(detail::source_elements(params)) * sizeof(T)), sizeof(T),
                params);
}

template <typename T>
void LoadData(const LocalTensor<T>& to, const LocalTensor<T>& from, const LoadData2DParams& params) {
  detail::load(detail::matrix(to), detail::matrix(from), sizeof(T), params);
}
template <typename T>
void LoadData(const LocalTensor<T>& to, const LocalTensor<T>& from, const LoadData2DParamsV2& params) {
  detail::load(detail::matrix(to), detail::matrix(from), sizeof(T), params);
}

template <typename T>
void Mmad(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b, const MmadParams& params) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t> || std::is_same_v<T, float>, "not modelled");
  detail::multiply(detail::matrix(c), detail::matrix(a), detail::matrix(b), sizeof(T), detail::widen<T>, params);
}

template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& to, const LocalTensor<U>& from, const FixpipeParamsV220& params) {
  if (params.ndNum != 1 || params.reluEn || params.unitFlag) twin::core().fail("Fixpipe: not modelled");
  detail::fixpipe(to, from, 2201, params.nSize, params.mSize, params.srcStride, params.dstStride, params.quantPre);
}
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& to, const LocalTensor<U>& from, const FixpipeParamsArch3510<config.format>& params) {
  if (params.params.ndNum != 1 || params.reluEn || params.unitFlag) twin::core().fail("Fixpipe: not modelled");
  detail::fixpipe(to, from, 3510, params.nSize, params.mSize, params.srcStride, params.dstStride, params.quantPre);
}

}  // namespace AscendC
