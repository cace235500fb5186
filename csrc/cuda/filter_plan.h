// How a row is shared out among blocks, for the kernels that filter one (filter.cuh).
#pragma once

#include <cstdint>

#include "../jit/cuda_launch.h"

namespace deepinfer::cuda {

struct FilterPlan {
  int threads, stages, cluster, most, capacity, bulk;
};

// For rows of which the k <= 4096 greatest are wanted. A GPU without the shared memory gets a shorter ring.
FilterPlan plan_filter(int64_t rows, int64_t row_bytes, int64_t k, const jit::DeviceFacts& facts);

// One to compile samples for: an H100 or H200.
jit::DeviceFacts typical_device();

// Of dynamic shared memory.
int filter_bytes(int threads, int stages, int capacity);

}  // namespace deepinfer::cuda
