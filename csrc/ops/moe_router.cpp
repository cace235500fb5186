// moe_router: schema, argument checks, outputs.

#include "moe_router.h"

#include "../cpu/moe_router.h"
#include "../cpu/parallel.h"
#include "../cuda/moe_router.h"
#include "../npu/moe_router.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr const char* op = "moe_router";

Score score_of(const std::string& name) {
  if (name == "softmax") return Score::softmax;
  if (name == "sigmoid") return Score::sigmoid;
  if (name == "sqrt_softplus") return Score::sqrt_softplus;
  fail(op, ": score must be softmax, sigmoid or sqrt_softplus, got ", name);
}

GroupScore group_score_of(const std::string& name) {
  if (name == "top2_sum") return GroupScore::top2_sum;
  if (name == "max") return GroupScore::max;
  fail(op, ": group_score must be top2_sum or max, got ", name);
}

void check_selection(const MoeRouterArgs& args) {
  const int64_t limit = MoeRouterArgs::kMaxExperts;
  DI_CHECK(args.num_experts >= 1 && args.num_experts <= limit, op, ": logits must have 1 to ", limit, " experts, got ",
           args.num_experts);
  DI_CHECK(args.num_groups >= 1 && args.num_experts % args.num_groups == 0, op, ": num_groups must divide the ",
           args.num_experts, " experts, got ", args.num_groups);
  DI_CHECK(args.topk_groups >= 1 && args.topk_groups <= args.num_groups, op, ": topk_groups must lie in [1, ",
           args.num_groups, "], got ", args.topk_groups);
  const int64_t group_size = args.num_experts / args.num_groups;
  DI_CHECK(args.num_groups == 1 || args.group_score != GroupScore::top2_sum || group_size >= 2, op,
           ": group_score top2_sum needs groups of at least 2 experts");
  DI_CHECK(args.topk >= 1 && args.topk <= args.topk_groups * group_size, op, ": topk must lie in [1, ",
           args.topk_groups * group_size, "], the experts that can be selected, got ", args.topk);
}

std::tuple<Tensor, Tensor> moe_router(const Tensor& logits, int64_t topk, const std::optional<Tensor>& bias,
                                      const std::string& score, bool score_after_topk, int64_t num_groups,
                                      int64_t topk_groups, const std::string& group_score, bool renormalize,
                                      double renorm_eps, double renorm_min, double scale,
                                      const std::optional<ScalarType>& weights_dtype,
                                      const std::optional<ScalarType>& ids_dtype) {
  DI_CHECK(logits.dim() == 2, op, ": logits must be 2-D, [tokens, experts], got shape ", shape_of(logits));
  MoeRouterArgs args{};
  args.dtype = float_dtype(op, "logits", logits);
  args.score = score_of(score);
  args.group_score = group_score_of(group_score);
  args.num_experts = logits.size(1);
  args.num_groups = num_groups;
  args.topk_groups = topk_groups;
  args.topk = topk;
  check_selection(args);
  if (bias) {
    DI_CHECK(bias->dim() == 1 && bias->size(0) == args.num_experts, op, ": bias must have shape [", args.num_experts,
             "], got ", shape_of(*bias));
    check_same_device(op, "bias", *bias, logits);
    args.bias_dtype = float_dtype(op, "bias", *bias);
  }
  DI_CHECK(renorm_eps >= 0, op, ": renorm_eps must not be negative, got ", renorm_eps);
  DI_CHECK(renorm_min >= 0, op, ": renorm_min must not be negative, got ", renorm_min);
  const ScalarType to_weights = weights_dtype.value_or(ScalarType::Float);
  DI_CHECK(is_float_dtype(to_weights), op, ": weights_dtype must be float32, bfloat16 or float16, got ",
           name_of(to_weights));
  const ScalarType to_ids = ids_dtype.value_or(ScalarType::Long);
  DI_CHECK(to_ids == ScalarType::Long || to_ids == ScalarType::Int, op, ": ids_dtype must be int64 or int32, got ",
           name_of(to_ids));

  const int64_t tokens = logits.size(0);
  Tensor weights = new_tensor(logits, {tokens, topk}, to_weights);
  Tensor ids = new_tensor(logits, {tokens, topk}, to_ids);
  Tensor dense = with_dense_rows(logits);
  std::optional<Tensor> dense_bias;
  if (bias && is_npu(*bias)) {  // whose kernel takes one dtype, that of all models
    dense_bias = torch::stable::to(*bias, ScalarType::Float);
    args.bias_dtype = DType::f32;
  } else if (bias) {
    dense_bias = *bias;
  }
  if (bias) args.bias = dense_bias.emplace(with_dense_rows(*dense_bias)).const_data_ptr();
  args.logits = dense.const_data_ptr();
  args.row_stride = dense.stride(0);
  args.weights = weights.mutable_data_ptr();
  args.weights_dtype = float_dtype(op, "weights", weights);
  args.ids = ids.mutable_data_ptr();
  args.wide_ids = to_ids == ScalarType::Long;
  args.score_after_topk = score_after_topk;
  args.renormalize = renormalize;
  args.renorm_eps = float(renorm_eps);
  args.renorm_min = float(renorm_min);
  args.scale = float(scale);
  args.tokens = tokens;
  if (logits.is_cuda()) {
    cuda::moe_router(args, logits.get_device_index());
  } else if (is_npu(logits)) {
    DI_CHECK(npu::router_fits(args, logits.get_device_index()), op, ": the scores of ", args.num_experts,
             " experts and ", args.topk, " choices do not fit a core of this NPU");
    npu::moe_router(args, logits.get_device_index());
  } else {
    cpu::parallel(cpu::moe_router, args, tokens, args.num_experts * 4);
  }
  return {weights, ids};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "moe_router(Tensor logits, int topk, *, Tensor? bias=None, str score=\"softmax\", bool score_after_topk=False,"
      " int num_groups=1, int topk_groups=1, str group_score=\"top2_sum\", bool renormalize=False,"
      " float renorm_eps=0.0, float renorm_min=0.0, float scale=1.0, ScalarType? weights_dtype=None,"
      " ScalarType? ids_dtype=None) -> (Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("moe_router", TORCH_BOX(&moe_router));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
