// From a tensor to the rows that kernels walk.
#pragma once

#include "check.h"

namespace deepinfer {

// The rows of `t` without its last `inner` dimensions; neighbouring dimensions that one stride can describe are merged.
inline Rows rows_of(const char* op, const Tensor& t, int inner = 1) {
  Rows rows;
  int64_t merged_sizes[64], merged_strides[64];
  int n = 0;
  for (int64_t d = 0; d + inner < t.dim(); ++d) {
    int64_t size = t.size(d), stride = t.stride(d);
    rows.count *= size;
    if (size == 1) continue;
    if (n > 0 && merged_strides[n - 1] == size * stride) {
      merged_sizes[n - 1] *= size;
      merged_strides[n - 1] = stride;
    } else {
      DI_CHECK(n < 64, op, ": tensors of more than 64 dimensions are not supported");
      merged_sizes[n] = size;
      merged_strides[n++] = stride;
    }
  }
  DI_CHECK(n <= Rows::kMaxDims, op, ": more than ", int(Rows::kMaxDims), " non-mergeable leading dimensions");
  rows.dims = n;
  for (int i = 0; i < n; ++i) {
    rows.sizes[i] = merged_sizes[i];
    rows.strides[i] = merged_strides[i];
  }
  return rows;
}

// `t` itself if its last dimension is dense, else a contiguous copy: every kernel may assume dense rows.
inline Tensor with_dense_rows(const Tensor& t) {
  bool dense = t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1;
  return dense ? t : torch::stable::contiguous(t);
}

}  // namespace deepinfer
