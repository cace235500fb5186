// From a tensor to the rows that kernels walk.
#pragma once

#include "check.h"

namespace deepinfer {

// Adds a dimension inside the ones that `rows` has; it is merged into the last one if one stride can describe both.
inline void append(const char* op, Rows& rows, int64_t size, int64_t stride) {
  rows.count *= size;
  if (size == 1) return;
  if (rows.dims > 0 && rows.strides[rows.dims - 1] == size * stride) {
    rows.sizes[rows.dims - 1] *= size;
    rows.strides[rows.dims - 1] = stride;
    return;
  }
  DI_CHECK(rows.dims < Rows::kMaxDims, op, ": more than ", int(Rows::kMaxDims), " non-mergeable leading dimensions");
  rows.sizes[rows.dims] = size;
  rows.strides[rows.dims++] = stride;
}

// The rows of `t` without its last `inner` dimensions.
inline Rows rows_of(const char* op, const Tensor& t, int inner = 1) {
  Rows rows;
  for (int64_t d = 0; d + inner < t.dim(); ++d) append(op, rows, t.size(d), t.stride(d));
  return rows;
}

// `t` itself if its last dimension is dense, else a contiguous copy: every kernel may assume dense rows, and rows_of
// that their dimensions fit.
inline Tensor with_dense_rows(const Tensor& t) {
  bool dense = t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1;
  return dense && t.dim() <= Rows::kMaxDims + 1 ? t : torch::stable::contiguous(t);
}

}  // namespace deepinfer
