// What ops with a norm inside share: its arguments, their checks, and the norm itself.
#pragma once

#include "check.h"
#include "norm.h"

namespace deepinfer {

// Throws std::invalid_argument for an unknown name.
WeightForm weight_form(const char* op, const std::string& name);

// Whether the weight and eps fit rows of `hidden_size` elements of x. Returns the dtype of the norm.
ScalarType check_norm(const char* op, const Tensor& x, int64_t hidden_size, const char* weight_name,
                      const std::optional<Tensor>& weight, double eps, WeightForm form, const std::string& form_name);

// The checked inputs of a norm of x, or of x + residual, in `args`, and the tensors that those point into.
class NormInputs {
 public:
  NormInputs(const char* op, RmsNormArgs& args, const Tensor& x, const std::optional<Tensor>& residual,
             const std::optional<Tensor>& weight, double eps, const std::string& form);

  ScalarType out_dtype() const { return out_dtype_; }

 private:
  std::optional<Tensor> x_, residual_, weight_;
  ScalarType out_dtype_;
};

// A fresh x + residual for `args` to write.
Tensor new_sum(RmsNormArgs& args, const Tensor& x);

void launch_norm(const RmsNormArgs& args, const Tensor& x);

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, const std::string& form);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps, const std::string& form);

}  // namespace deepinfer
