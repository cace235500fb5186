// What the matrix products share: checks, the way operands lie, and the launch on any device.
#pragma once

#include <vector>

#include "../cpu/gemm.h"
#include "check.h"
#include "gemm.h"

namespace deepinfer {

inline int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline void check_like_x(const char* op, const char* argument, const Tensor& t, const Tensor& x,
                         const char* x_name = "x") {
  DI_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", argument, " must have the dtype of ", x_name, ", ",
           name_of(x.scalar_type()), ", got ", name_of(t.scalar_type()));
  check_same_device(op, argument, t, x);
}

// Of a product whose first operand is `a`.
inline ScalarType result_type(const char* op, const Tensor& a, std::optional<ScalarType> out_dtype,
                              const char* a_name = "a") {
  const ScalarType type = out_dtype.value_or(a.scalar_type());
  DI_CHECK(type == a.scalar_type() || type == ScalarType::Float, op,
           ": the dtype of the result must be float32 or that of ", a_name, ", ", name_of(a.scalar_type()), ", got ",
           name_of(type));
  return type;
}

// The product on the device of `like`.
void matmul(const MatmulArgs& args, const Tensor& like);

// Runs the product over the rows of each group; x, weight, bias, out, sizes and gate are set already.
void grouped_gemm_on_cpu(GroupedGemmArgs& args, const Tensor& like, const std::vector<RowBlock>& groups);

// `t` [..., rows, depth] itself where its device multiplies it as it lies, else a copy that it does. Tokens may not
// have strided depth on a CPU, e4m3 operands not on a GPU.
Tensor as_operand(const Tensor& t);
Tensor as_tokens(const Tensor& t);
Tensor as_e4m3_operand(const Tensor& t);

// The ends or counts of the rows of each expert, in memory of the CPU, are possible.
void check_groups(const char* op, const char* argument, const MatmulArgs& args);

// Whether the rows of `out` [experts, rows, columns] lie at one stride and are dense: what products are written to.
bool has_plain_rows(const Tensor& out);
int64_t row_stride(const Tensor& t);
// What an op may write to that leaves the rows of no expert alone.
void check_masked_result(const char* op, const Tensor& out, const Tensor& x, int64_t columns);

// x: [rows, depth], or [experts, group_rows, depth] with the experts one behind the other; weight: [columns, depth] or
// [experts, columns, depth].
void set_x(MatmulArgs& args, const Tensor& x);
void set_weight(MatmulArgs& args, const Tensor& weight);

}  // namespace deepinfer
