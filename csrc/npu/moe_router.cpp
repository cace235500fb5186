#include "moe_router.h"

#include "../jit/npu_launch.h"
#include "moe_router_plan.h"

namespace deepinfer::npu {

namespace {

struct MoeRouterConfig {
  DType dtype, weights;
  Score score;
  int wide;
};

const char* name_of(Score score) {
  switch (score) {
    case Score::softmax: return "Score::softmax";
    case Score::sigmoid: return "Score::sigmoid";
    case Score::sqrt_softplus: return "Score::sqrt_softplus";
  }
  return "";
}

jit::AscendSource describe(const MoeRouterConfig& c) {
  jit::AscendSource source;
  source.name = "moe_router";
  source.header = "npu/moe_router_kernel.h";
  source.tiling = "MoeRouterTiling";
  source.buffers = {"logits", "bias", "weights", "ids"};
  source.facts = {{"dtype", c.dtype}, {"weights", c.weights}, {"score", name_of(c.score)}, {"wide", c.wide}};
  return source;
}

std::vector<MoeRouterConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  return {{bf16, f32, Score::softmax, 1},
          {f32, f32, Score::sigmoid, 0},
          {bf16, bf16, Score::sqrt_softplus, 1},
          {f16, f16, Score::softmax, 0}};
}

jit::AscendKernels<MoeRouterConfig> kernels(describe, samples);

}  // namespace

bool router_fits(const MoeRouterArgs& args, int device) { return router_fits(args, chip_of(device)); }

void moe_router(const MoeRouterArgs& args, int device) {
  const Chip chip = chip_of(device);
  const MoeRouterTiling tiling = tile_moe_router(args, chip);
  const MoeRouterConfig config{args.dtype, args.weights_dtype, args.score, args.wide_ids};
  kernels.launch(device, config, blocks_of(tiling, chip), {args.logits, args.bias, args.weights, args.ids}, tiling);
}

}  // namespace deepinfer::npu
