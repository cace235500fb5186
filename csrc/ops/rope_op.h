// What the ops of the rope family share: the checks of their arguments, and the rows that kernels walk.
#pragma once

#include "norm_op.h"
#include "rope.h"
#include "rows.h"

namespace deepinfer {

struct Angles {
  Tensor cos, sin;
  const std::optional<Tensor>& positions;
};

// The tables as the kernels take them: an NPU reads no single columns.
Angles angles_of(const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions);

// Checks the arguments that q and k share and fills the part of `args` that they decide.
void prepare(const char* op, RopeArgs& args, const Tensor& q, const std::optional<Tensor>& k, const Angles& angles,
             const std::string& style, bool inverse, std::optional<int64_t> rotary_dim);

// Checks what a norm needs and fills the part of `args` that it decides. Returns the dtype of the normed rows.
ScalarType prepare_norm(const char* op, RopeArgs& args, const Tensor& q, const std::optional<Tensor>& k,
                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
                        const std::string& form);

// Whether a kernel norms and rotates in one go: it holds a row in a type that the norm does not change.
bool is_one_kernel(const RopeArgs& args, const Tensor& q, ScalarType normed);

// The weights in `args`, for a kernel that norms and rotates, and the tensors that those point into.
class DenseWeights {
 public:
  DenseWeights(const char* op, RopeArgs& args, const std::optional<Tensor>& q_weight,
               const std::optional<Tensor>& k_weight) {
    args.normed = true;
    args.norm.weight_dtype = q_weight ? float_dtype(op, "q_weight", *q_weight) : args.dtype;
    if (q_weight) args.norm.weights[0] = q_.emplace(with_dense_rows(*q_weight)).const_data_ptr();
    if (k_weight) args.norm.weights[1] = k_.emplace(with_dense_rows(*k_weight)).const_data_ptr();
  }

 private:
  std::optional<Tensor> q_, k_;
};

// Where rows lie: the first one, and the strides of the leading dimensions.
struct Place {
  const void* data;
  std::vector<int64_t> strides;
};

// Where rows go; with `slots`, the strides of the positions in the cache, the slots of the rows are to be added.
struct Target {
  Place place;
  int64_t width;
  std::vector<int64_t> slots;
};

Target target_of(const Tensor& out, DType dtype);

// The walk over the rows of x, of which the first elements are turned and the others follow them.
RopeTensor walk(const char* op, RopeArgs& args, const char* name, const Tensor& x, const Target& out,
                const Angles& angles);

void check_destination(const char* op, const char* name, const Tensor& x, const Angles& angles);

void launch_rope(const char* op, RopeArgs& args, const Tensor& q, const Angles& angles);

}  // namespace deepinfer
