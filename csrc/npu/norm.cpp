#include "norm.h"

#include "../cuda/norm.h"
#include "../jit/npu_launch.h"
#include "norm_plan.h"

namespace deepinfer::npu {

namespace {

struct RmsNormConfig {
  DType x, weight, out;
  WeightForm form;
  int add;
};

jit::AscendSource describe(const RmsNormConfig& c) {
  jit::AscendSource source;
  source.name = "rms_norm";
  source.header = "npu/norm_kernel.h";
  source.tiling = "RmsNormTiling";
  source.buffers = {"x", "residual", "weight", "out", "sum"};
  source.facts = {{"x", c.x}, {"weight", c.weight}, {"out", c.out}, {"form", cuda::name_of(c.form)}, {"add", c.add}};
  return source;
}

std::vector<RmsNormConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  return {{bf16, bf16, bf16, WeightForm::cast_mul, 0}, {bf16, bf16, bf16, WeightForm::cast_mul, 1},
          {f16, f32, f32, WeightForm::cast_mul, 1},    {f32, f32, f32, WeightForm::mul_cast, 1},
          {bf16, f32, bf16, WeightForm::one_plus, 1},  {f16, f16, f16, WeightForm::none, 0}};
}

jit::AscendKernels<RmsNormConfig> kernels(describe, samples);

}  // namespace

void rms_norm(const RmsNormArgs& args, int device) {
  const Chip chip = chip_of(device);
  const RmsNormTiling tiling = tile_rms_norm(args, chip);
  const RmsNormConfig config{args.dtype, args.weight_dtype, args.out_dtype, args.form, args.residual ? 1 : 0};
  kernels.launch(device, config, blocks_of(tiling, chip), {args.x, args.residual, args.weight, args.out, args.sum},
                 tiling);
}

}  // namespace deepinfer::npu
