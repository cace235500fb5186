// The instructions for the element types that kernels give them: compiled once and fast, with the model (instances.cpp),
// not with every kernel, which is compiled in a hurry. What is missing here works as well.
#pragma once

#include "copy.h"
#include "cube.h"
#include "repeats.h"
#include "select.h"
#include "vector.h"

#ifndef TWIN_INSTANCE
#define TWIN_INSTANCE extern template
#endif

namespace AscendC {

#define TWIN_TENSOR(T)                  \
  TWIN_INSTANCE class LocalTensor<T>;   \
  TWIN_INSTANCE class GlobalTensor<T>;
TWIN_TENSOR(float)
TWIN_TENSOR(half)
TWIN_TENSOR(bfloat16_t)
TWIN_TENSOR(int8_t)
TWIN_TENSOR(uint8_t)
TWIN_TENSOR(int16_t)
TWIN_TENSOR(uint16_t)
TWIN_TENSOR(int32_t)
TWIN_TENSOR(uint32_t)
TWIN_TENSOR(int64_t)
#undef TWIN_TENSOR

#define TWIN_ONE(name, T) TWIN_INSTANCE void name(const LocalTensor<T>&, const LocalTensor<T>&, int32_t);
#define TWIN_TWO(name, T) \
  TWIN_INSTANCE void name(const LocalTensor<T>&, const LocalTensor<T>&, const LocalTensor<T>&, int32_t);
#define TWIN_SCALAR(name, T) TWIN_INSTANCE void name(const LocalTensor<T>&, const LocalTensor<T>&, T, int32_t);
TWIN_ONE(Abs, float)
TWIN_ONE(Exp, float)
TWIN_ONE(Ln, float)
TWIN_ONE(Sqrt, float)
TWIN_TWO(Add, float)
TWIN_TWO(Add, int16_t)
TWIN_TWO(Add, int32_t)
TWIN_TWO(Sub, float)
TWIN_TWO(Mul, float)
TWIN_TWO(Div, float)
TWIN_TWO(Max, float)
TWIN_SCALAR(Adds, float)
TWIN_SCALAR(Adds, int16_t)
TWIN_SCALAR(Adds, int32_t)
TWIN_SCALAR(Muls, float)
TWIN_SCALAR(Muls, int16_t)
TWIN_SCALAR(Muls, int32_t)
TWIN_SCALAR(Maxs, float)
TWIN_SCALAR(Maxs, int32_t)
TWIN_SCALAR(Mins, float)
TWIN_SCALAR(ShiftLeft, uint16_t)
TWIN_SCALAR(ShiftLeft, int32_t)
TWIN_SCALAR(ShiftLeft, uint32_t)
TWIN_SCALAR(ShiftRight, int16_t)
TWIN_SCALAR(ShiftRight, uint16_t)
TWIN_SCALAR(ShiftRight, int32_t)
TWIN_SCALAR(ShiftRight, uint32_t)
#undef TWIN_ONE
#undef TWIN_TWO
#undef TWIN_SCALAR

TWIN_INSTANCE void Duplicate(const LocalTensor<float>&, float, int32_t);
TWIN_INSTANCE void Duplicate(const LocalTensor<int16_t>&, int16_t, int32_t);
TWIN_INSTANCE void Duplicate(const LocalTensor<uint16_t>&, uint16_t, int32_t);
TWIN_INSTANCE void Duplicate(const LocalTensor<int32_t>&, int32_t, int32_t);

TWIN_INSTANCE void ReduceSum(const LocalTensor<float>&, const LocalTensor<float>&, const LocalTensor<float>&, int32_t);
TWIN_INSTANCE void ReduceMax(const LocalTensor<float>&, const LocalTensor<float>&, const LocalTensor<float>&, int32_t,
                             bool);

#define TWIN_REPEATED(name, T)                                                                                      \
  TWIN_INSTANCE void name(const LocalTensor<T>&, const LocalTensor<T>&, const LocalTensor<T>&, uint64_t, uint8_t, \
                          const BinaryRepeatParams&);
TWIN_REPEATED(Add, float)
TWIN_REPEATED(Mul, float)
TWIN_REPEATED(Max, int32_t)
TWIN_REPEATED(And, uint16_t)
#undef TWIN_REPEATED
TWIN_INSTANCE void BlockReduceMax(const LocalTensor<float>&, const LocalTensor<float>&, int32_t, int32_t, int32_t, int32_t,
                                  int32_t);
TWIN_INSTANCE void BlockReduceSum(const LocalTensor<float>&, const LocalTensor<float>&, int32_t, int32_t, int32_t, int32_t,
                                  int32_t);
TWIN_INSTANCE void WholeReduceSum(const LocalTensor<float>&, const LocalTensor<float>&, int32_t, int32_t, int32_t, int32_t,
                                  int32_t);
TWIN_INSTANCE void Brcb(const LocalTensor<uint32_t>&, const LocalTensor<uint32_t>&, uint8_t, const BrcbRepeatParams&);

#define TWIN_CAST(To, From) \
  TWIN_INSTANCE void Cast(const LocalTensor<To>&, const LocalTensor<From>&, const RoundMode&, uint32_t);
TWIN_CAST(float, float)
TWIN_CAST(float, half)
TWIN_CAST(float, bfloat16_t)
TWIN_CAST(float, int32_t)
TWIN_CAST(half, float)
TWIN_CAST(half, int8_t)
TWIN_CAST(half, uint8_t)
TWIN_CAST(half, int16_t)
TWIN_CAST(bfloat16_t, float)
TWIN_CAST(int8_t, half)
TWIN_CAST(uint8_t, half)
TWIN_CAST(uint8_t, int32_t)
TWIN_CAST(int16_t, float)
TWIN_CAST(int16_t, half)
TWIN_CAST(int32_t, float)
TWIN_CAST(float, fp8_e4m3fn_t)
TWIN_CAST(fp8_e4m3fn_t, float)
#undef TWIN_CAST

#define TWIN_GATHER(T)                                                                                              \
  TWIN_INSTANCE void Gather(const LocalTensor<T>&, const LocalTensor<T>&, const LocalTensor<uint32_t>&, uint32_t, \
                            uint32_t);
TWIN_GATHER(float)
TWIN_GATHER(uint16_t)
TWIN_GATHER(int32_t)
TWIN_GATHER(uint32_t)
#undef TWIN_GATHER

#define TWIN_SELECT(T, U)                                                                                      \
  TWIN_INSTANCE void GatherMask(const LocalTensor<T>&, const LocalTensor<T>&, const LocalTensor<U>&, bool, uint32_t, \
                                const GatherMaskParams&, uint64_t&);
TWIN_SELECT(float, uint32_t)
TWIN_SELECT(int32_t, uint32_t)
TWIN_SELECT(uint32_t, uint32_t)
TWIN_SELECT(uint16_t, uint16_t)
#undef TWIN_SELECT
TWIN_INSTANCE void GatherMask(const LocalTensor<uint32_t>&, const LocalTensor<uint32_t>&, uint8_t, bool, uint32_t,
                              const GatherMaskParams&, uint64_t&);
TWIN_INSTANCE void Compares(const LocalTensor<uint8_t>&, const LocalTensor<float>&, float, CMPMODE, uint32_t);
TWIN_INSTANCE void Sort32(const LocalTensor<float>&, const LocalTensor<float>&, const LocalTensor<uint32_t>&, int32_t);
TWIN_INSTANCE void MrgSort(const LocalTensor<float>&, const MrgSortSrcList<float>&, const MrgSort4Info&);

#define TWIN_COPY(T)                                                                                                  \
  TWIN_INSTANCE void DataCopyPad(const LocalTensor<T>&, const GlobalTensor<T>&, const DataCopyExtParams&, \
                                 const DataCopyPadExtParams<T>&);                                                     \
  TWIN_INSTANCE void DataCopyPad(const GlobalTensor<T>&, const LocalTensor<T>&, const DataCopyExtParams&);
TWIN_COPY(float)
TWIN_COPY(uint8_t)
TWIN_COPY(uint16_t)
TWIN_COPY(int32_t)
TWIN_COPY(uint32_t)
TWIN_COPY(int64_t)
#undef TWIN_COPY

#define TWIN_MATRIX(T)                                                                                     \
  TWIN_INSTANCE void DataCopy(const LocalTensor<T>&, const GlobalTensor<T>&, const Nd2NzParams&);          \
  TWIN_INSTANCE void LoadData(const LocalTensor<T>&, const LocalTensor<T>&, const LoadData2DParams&);      \
  TWIN_INSTANCE void LoadData(const LocalTensor<T>&, const LocalTensor<T>&, const LoadData2DParamsV2&);    \
  TWIN_INSTANCE void Mmad(const LocalTensor<float>&, const LocalTensor<T>&, const LocalTensor<T>&, const MmadParams&);
TWIN_MATRIX(float)
TWIN_MATRIX(half)
TWIN_MATRIX(bfloat16_t)
#undef TWIN_MATRIX

}  // namespace AscendC
