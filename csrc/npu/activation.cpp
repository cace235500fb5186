#include "activation.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../jit/npu_launch.h"
#include "activation_plan.h"

namespace deepinfer::npu {

namespace {

struct GatedConfig {
  DType dtype;
  Gated form;
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
  source.buffers = {"gate", "up", "weights", "out"};
  source.facts = {{"dtype", c.dtype}, {"form", name_of(c.form)}};
  return source;
}

std::vector<GatedConfig> samples() {
  return {{DType::bf16, Gated::silu}, {DType::f16, Gated::swish}, {DType::f32, Gated::gelu},
          {DType::bf16, Gated::gelu_tanh}};
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

void gated_activation(const GatedArgs& args, int device) {
  const Chip chip = chip_of(device);
  GatedTiling tiling = tile_gated(args, chip);
  tiling.limit = rounded(args.limit, args.dtype);
  kernels.launch(device, {args.dtype, args.form}, blocks_of(tiling, chip),
                 {args.gate, args.up, args.row_weights, args.out}, tiling);
}

}  // namespace deepinfer::npu
