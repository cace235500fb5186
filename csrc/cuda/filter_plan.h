// How a row is shared out among blocks, for the kernels that filter one (filter.cuh).
#pragma once

#include <cstdint>

namespace deepinfer::cuda {

struct FilterPlan {
  int threads, stages, cluster, most, capacity, bulk;
};

// For rows of which the k <= 4096 greatest are wanted.
FilterPlan plan_filter(int64_t rows, int64_t row_bytes, int64_t k, int multiprocessors, int capability);

// Of dynamic shared memory.
int filter_bytes(int threads, int stages, int capacity);

}  // namespace deepinfer::cuda
