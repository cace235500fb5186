#include "norm.h"

#include "../cuda/norm.h"
#include "../cuda/quant_names.h"
#include "../jit/npu_launch.h"
#include "norm_plan.h"

namespace deepinfer::npu {

namespace {

struct RmsNormConfig {
  DType x, weight, out;
  WeightForm form;
  int add, quantized;
  Code code;
  ScaleType scale;
};

jit::AscendSource describe(const RmsNormConfig& c) {
  jit::AscendSource source;
  source.name = "rms_norm";
  source.header = "npu/norm_kernel.h";
  source.tiling = "RmsNormTiling";
  source.buffers = {"x", "residual", "weight", "out", "sum", "scales"};
  source.facts = {{"x", c.x}, {"weight", c.weight}, {"out", c.out}, {"form", cuda::name_of(c.form)}, {"add", c.add},
                  {"quantized", c.quantized}, {"code", cuda::name_of(c.code)}, {"scale", cuda::name_of(c.scale)}};
  return source;
}

std::vector<RmsNormConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  constexpr Code int8 = Code::int8;
  constexpr ScaleType scale = ScaleType::f32;
  return {{bf16, bf16, bf16, WeightForm::cast_mul, 0, 0, int8, scale},
          {bf16, bf16, bf16, WeightForm::cast_mul, 1, 0, int8, scale},
          {f16, f32, f32, WeightForm::cast_mul, 1, 0, int8, scale},
          {f32, f32, f32, WeightForm::mul_cast, 1, 0, int8, scale},
          {bf16, f32, bf16, WeightForm::one_plus, 1, 0, int8, scale},
          {f16, f16, f16, WeightForm::none, 0, 0, int8, scale},
          {bf16, bf16, bf16, WeightForm::cast_mul, 0, 1, int8, scale},
          {bf16, bf16, bf16, WeightForm::cast_mul, 1, 1, Code::e4m3, ScaleType::f32}};
}

jit::AscendKernels<RmsNormConfig> kernels(describe, samples);

}  // namespace

bool quantizes_rows(const RmsNormArgs& args, int device) { return quantizes_rows(args, chip_of(device)); }

void rms_norm(const RmsNormArgs& args, int device) {
  const Chip chip = chip_of(device);
  const RmsNormTiling tiling = tile_rms_norm(args, chip);
  RmsNormConfig config{args.dtype, args.weight_dtype, args.out_dtype, args.form, args.residual != nullptr, 0,
                       Code::int8, ScaleType::f32};
  const QuantizedRows& rows = args.quantized;
  if (!args.out) config.quantized = 1, config.code = rows.code, config.scale = rows.scales.type;
  kernels.launch(device, config, blocks_of(tiling, chip),
                 {args.x, args.residual, args.weight, args.out ? args.out : rows.codes, args.sum, rows.scales.data},
                 tiling);
}

}  // namespace deepinfer::npu
