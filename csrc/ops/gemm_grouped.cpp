// grouped_mm, masked_mm and masked_mm_: schemas, argument checks, outputs.

#include "../cuda/gemm.h"
#include "gemm_common.h"
#include "overlap.h"
#include "rows.h"

namespace deepinfer {

namespace {

// Checks everything but the rows of x.
void check(const char* op, MatmulArgs& args, const Tensor& x, const Tensor& weight, const char* groups_name,
           const Tensor& groups, const std::optional<Tensor>& bias) {
  args.dtype = args.out_dtype = float_dtype(op, "x", x);
  args.depth = x.size(x.dim() - 1);
  DI_CHECK(weight.dim() == 3 && weight.size(1) == args.depth, op, ": weight must have shape [E, ", args.depth,
           ", N], got ", shape_of(weight));
  check_like_x(op, "weight", weight, x);
  args.experts = weight.size(0);
  args.columns = weight.size(2);
  DI_CHECK(groups.scalar_type() == ScalarType::Int, op, ": ", groups_name, " must be int32, got ",
           name_of(groups.scalar_type()));
  DI_CHECK(groups.dim() == 1 && groups.size(0) == args.experts, op, ": ", groups_name, " must have shape [",
           args.experts, "], got ", shape_of(groups));
  check_same_device(op, groups_name, groups, x);
  if (bias) {
    DI_CHECK(bias->dim() == 2 && bias->size(0) == args.experts && bias->size(1) == args.columns, op,
             ": bias must have shape [", args.experts, ", ", args.columns, "], got ", shape_of(*bias));
    check_like_x(op, "bias", *bias, x);
  }
  DI_CHECK(!x.is_cuda() || args.experts <= cuda::kMostExperts, op, ": at most ", cuda::kMostExperts,
           " experts on a GPU, got ", args.experts);
  args.scale = 1;
  args.bias_step = BiasStep::rounded;
}

// `out`: see has_plain_rows.
void launch(MatmulArgs& args, const Tensor& out, const Tensor& x, const Tensor& weight,
            const std::optional<Tensor>& bias) {
  args.out = const_cast<void*>(out.const_data_ptr());
  args.out_stride = row_stride(out);
  std::optional<Tensor> dense_bias;
  if (bias) {
    args.bias = dense_bias.emplace(with_dense_rows(*bias)).const_data_ptr();
    args.bias_stride = dense_bias->stride(0);
  }
  const Tensor x_operand = as_tokens(x), weight_operand = as_operand(torch::stable::transpose(weight, 1, 2));
  set_x(args, x_operand);
  set_weight(args, weight_operand);
  matmul(args, x);
}

// Of the shape of x but for the columns.
Tensor new_result(const MatmulArgs& args, const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = args.columns;
  return new_tensor(x, sizes, x.scalar_type());
}

Tensor grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias) {
  const char* op = "grouped_mm";
  DI_CHECK(x.dim() == 2, op, ": x must have shape [P, K], got ", shape_of(x));
  MatmulArgs args{};
  check(op, args, x, weight, "offsets", offsets, bias);
  const Tensor dense_offsets = torch::stable::contiguous(offsets);
  args.rows = x.size(0);
  args.row_groups = RowGroups::ends;
  args.groups = static_cast<const int32_t*>(dense_offsets.const_data_ptr());
  if (!x.is_cuda()) check_groups(op, "offsets", args);
  args.fill = true;
  const Tensor out = new_result(args, x);
  launch(args, out, x, weight, bias);
  return out;
}

// Returns the dense storage of counts, which args points to.
Tensor check_masked(const char* op, MatmulArgs& args, const Tensor& x, const Tensor& weight, const Tensor& counts,
                    const std::optional<Tensor>& bias) {
  DI_CHECK(x.dim() == 3, op, ": x must have shape [E, M, K], got ", shape_of(x));
  check(op, args, x, weight, "counts", counts, bias);
  DI_CHECK(x.size(0) == args.experts, op, ": x must have shape [", args.experts, ", M, ", args.depth, "], got ",
           shape_of(x));
  const Tensor dense_counts = torch::stable::contiguous(counts);
  args.group_rows = x.size(1);
  args.rows = args.experts * args.group_rows;
  args.row_groups = RowGroups::counts;
  args.groups = static_cast<const int32_t*>(dense_counts.const_data_ptr());
  if (!x.is_cuda()) check_groups(op, "counts", args);
  return dense_counts;
}

Tensor masked_mm(const Tensor& x, const Tensor& weight, const Tensor& counts, const std::optional<Tensor>& bias) {
  MatmulArgs args{};
  const Tensor dense_counts = check_masked("masked_mm", args, x, weight, counts, bias);
  args.fill = true;
  const Tensor out = new_result(args, x);
  launch(args, out, x, weight, bias);
  return out;
}

void masked_mm_(Tensor out, const Tensor& x, const Tensor& weight, const Tensor& counts,
                const std::optional<Tensor>& bias) {
  const char* op = "masked_mm_";
  MatmulArgs args{};
  const Tensor dense_counts = check_masked(op, args, x, weight, counts, bias);
  check_masked_result(op, out, x, args.columns);
  check_like_x(op, "out", out, x);
  DI_CHECK(!overlap(out, x) && !overlap(out, weight) && !overlap(out, counts) && !(bias && overlap(out, *bias)), op,
           ": out is written and must not share memory with another argument");
  const bool plain = has_plain_rows(out);
  const Tensor to = plain ? out : torch::stable::contiguous(out);
  launch(args, to, x, weight, bias);
  if (!plain) torch::stable::copy_(out, to);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("grouped_mm(Tensor x, Tensor weight, Tensor offsets, Tensor? bias=None) -> Tensor");
  m.def("masked_mm(Tensor x, Tensor weight, Tensor counts, Tensor? bias=None) -> Tensor");
  m.def("masked_mm_(Tensor(a!) out, Tensor x, Tensor weight, Tensor counts, Tensor? bias=None) -> ()");
}

static void implement(auto& m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("masked_mm", TORCH_BOX(&masked_mm));
  m.impl("masked_mm_", TORCH_BOX(&masked_mm_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
