// Parallel loops over torch's own thread pool. Included by csrc/ops only.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace deepinfer::cpu {

// Runs kernel(args, begin, end) over [0, count). `cost` is about the bytes touched by one item; below roughly 32 KB a
// thread costs more than it brings.
template <typename Args>
void parallel(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count, int64_t cost) {
  if (count <= 0) return;
  int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, cost));
  if (count <= grain) return kernel(args, 0, count);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace deepinfer::cpu
