// rms_norm and add_rms_norm: schemas, argument checks, outputs. Only the launch depends on the device.

#include "norm.h"

#include "../cpu/norm.h"
#include "../cpu/parallel.h"
#include "../cuda/norm.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

WeightForm weight_form(const char* op, const std::string& name) {
  if (name == "cast_mul") return WeightForm::cast_mul;
  if (name == "mul_cast") return WeightForm::mul_cast;
  if (name == "one_plus") return WeightForm::one_plus;
  if (name == "none") return WeightForm::none;
  fail(op, ": weight_form must be cast_mul, mul_cast, one_plus or none, got ", name);
}

// Checks everything but the residual and allocates the output.
Tensor prepare(const char* op, RmsNormArgs& args, const Tensor& x, const std::optional<Tensor>& weight, double eps,
               const std::string& form) {
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  args.dtype = float_dtype(op, "x", x);
  args.weight_dtype = args.dtype;
  args.form = weight_form(op, form);
  args.hidden_size = x.size(x.dim() - 1);
  DI_CHECK(args.hidden_size > 0, op, ": the last dimension of x must not be empty");
  DI_CHECK(eps >= 0, op, ": eps must not be negative, got ", eps);
  args.eps = float(eps);
  args.weight = nullptr;
  auto out_dtype = x.scalar_type();
  if (args.form == WeightForm::none) {
    DI_CHECK(!weight, op, ": weight must be None with weight_form none");
  } else {
    DI_CHECK(weight.has_value(), op, ": weight is required with weight_form ", form);
    DI_CHECK(weight->dim() == 1 && weight->size(0) == args.hidden_size, op, ": weight must have shape [",
             args.hidden_size, "], got ", shape_of(*weight));
    check_same_device(op, "weight", *weight, x);
    args.weight_dtype = float_dtype(op, "weight", *weight);
    if (args.form == WeightForm::cast_mul) out_dtype = promote(x.scalar_type(), weight->scalar_type());
  }
  Tensor out = new_tensor(x, sizes_of(x), out_dtype);
  args.out_dtype = float_dtype(op, "out", out);
  args.out = out.mutable_data_ptr();
  return out;
}

void launch(const RmsNormArgs& args, const Tensor& x) {
  if (x.is_cuda()) return cuda::rms_norm(args, x.get_device_index());
  cpu::parallel(cpu::rms_norm, args, args.x_rows.count, args.hidden_size * 4);
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, const std::string& form) {
  const char* op = "rms_norm";
  RmsNormArgs args{};
  Tensor out = prepare(op, args, x, weight, eps, form);
  Tensor dense_x = with_dense_rows(x);
  std::optional<Tensor> dense_weight;
  if (weight) args.weight = dense_weight.emplace(with_dense_rows(*weight)).const_data_ptr();
  args.x = dense_x.const_data_ptr();
  args.x_rows = rows_of(op, dense_x);
  launch(args, x);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps, const std::string& form) {
  const char* op = "add_rms_norm";
  RmsNormArgs args{};
  DI_CHECK(same_shape(x, residual), op, ": residual must have the shape of x, ", shape_of(x), ", got ",
           shape_of(residual));
  DI_CHECK(residual.scalar_type() == x.scalar_type(), op, ": residual must have the dtype of x, ",
           name_of(x.scalar_type()), ", got ", name_of(residual.scalar_type()));
  check_same_device(op, "residual", residual, x);
  Tensor out = prepare(op, args, x, weight, eps, form);
  Tensor sum = new_tensor(x, sizes_of(x), x.scalar_type());
  Tensor dense_x = with_dense_rows(x), dense_residual = with_dense_rows(residual);
  std::optional<Tensor> dense_weight;
  if (weight) args.weight = dense_weight.emplace(with_dense_rows(*weight)).const_data_ptr();
  args.x = dense_x.const_data_ptr();
  args.x_rows = rows_of(op, dense_x);
  args.residual = dense_residual.const_data_ptr();
  args.residual_rows = rows_of(op, dense_residual);
  args.sum = sum.mutable_data_ptr();
  launch(args, x);
  return {out, sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, str weight_form=\"cast_mul\") -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, str weight_form=\"cast_mul\")"
      " -> (Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
