#include "activation.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../cuda/quant_names.h"
#include "../jit/npu_launch.h"
#include "activation_plan.h"

namespace deepinfer::npu {

namespace {

struct GatedConfig {
  DType dtype;
  Gated form;
  int quantized;
  Code code;
  ScaleType scale;
};

const char* name_of(Gated form) {
  switch (form) {
    case Gated::silu: return "Gated::silu";
    case Gated::swish: return "Gated::swish";
    case Gated::gelu: return "Gated::gelu";
    case Gated::gelu_tanh: return "Gated::gelu_tanh";
  }
  return "";
}

jit::AscendSource describe(const GatedConfig& c) {
  jit::AscendSource source;
  source.name = "gated_activation";
  source.header = "npu/activation_kernel.h";
  source.tiling = "GatedTiling";
  source.buffers = {"gate", "up", "weights", "map", "out", "scales"};
  source.facts = {{"dtype", c.dtype}, {"form", name_of(c.form)}, {"quantized", c.quantized},
                  {"code", cuda::name_of(c.code)}, {"scale", cuda::name_of(c.scale)}};
  return source;
}

std::vector<GatedConfig> samples() {
  constexpr Code int8 = Code::int8;
  constexpr ScaleType f32 = ScaleType::f32;
  return {{DType::bf16, Gated::silu, 0, int8, f32}, {DType::f16, Gated::swish, 0, int8, f32},
          {DType::f32, Gated::gelu, 0, int8, f32},  {DType::bf16, Gated::gelu_tanh, 0, int8, f32},
          {DType::bf16, Gated::silu, 1, int8, f32}, {DType::bf16, Gated::silu, 1, Code::e4m3, f32}};
}

jit::AscendKernels<GatedConfig> kernels(describe, samples);

float rounded(float x, DType dtype) {
  switch (dtype) {
    case DType::bf16: return torch::headeronly::BFloat16(x);
    case DType::f16: return torch::headeronly::Half(x);
    case DType::f32: break;
  }
  return x;
}

}  // namespace

bool quantizes_rows(const GatedQuantArgs& args, int device) { return quantizes_rows(args, chip_of(device)); }

void gated_quant(const GatedQuantArgs& args, int device) {
  const Chip chip = chip_of(device);
  const GatedArgs& gated = args.gated;
  GatedTiling tiling = tile_gated(args, chip);
  tiling.limit = rounded(gated.limit, gated.dtype);
  GatedConfig config{gated.dtype, gated.form, 0, Code::int8, ScaleType::f32};
  const QuantizedRows& rows = args.quantized;
  if (!gated.out) config.quantized = 1, config.code = rows.code, config.scale = rows.scales.type;
  kernels.launch(device, config, blocks_of(tiling, chip),
                 {gated.gate, gated.up, gated.row_weights, args.rows_to_slots, gated.out ? gated.out : rows.codes,
                  rows.scales.data},
                 tiling);
}

void gated_activation(const GatedArgs& args, int device) { gated_quant({args, {}, nullptr, 0}, device); }

}  // namespace deepinfer::npu
