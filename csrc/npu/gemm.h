#pragma once

#include "../ops/gemm.h"

namespace deepinfer::npu {

// Floats of scratch that a dense product needs: its sums, where they are not the result yet.
int64_t matmul_scratch(const MatmulArgs& args);

// On torch's current stream of the device. k is dense, or for elements of 2 bytes the rows or columns are.
void matmul(const MatmulArgs& args, float* scratch, int device);

}  // namespace deepinfer::npu
