#include "quant.h"

#include <stdexcept>
#include <string>

#include "../jit/npu_launch.h"
#include "quant_plan.h"

namespace deepinfer::npu {

namespace {

struct QuantizeConfig {
  DType dtype;
  int power;
};

jit::AscendSource describe(const QuantizeConfig& c) {
  jit::AscendSource source;
  source.name = "quantize";
  source.header = "npu/quant_kernel.h";
  source.tiling = "QuantTiling";
  source.buffers = {"x", "codes", "scales"};
  source.facts = {{"dtype", c.dtype}, {"power", c.power}};
  return source;
}

std::vector<QuantizeConfig> samples() { return {{DType::bf16, 0}, {DType::f16, 1}, {DType::f32, 0}}; }

jit::AscendKernels<QuantizeConfig> kernels(describe, samples);

}  // namespace

void check_quantize(const char* op, const QuantizeArgs& args) {
  const auto refuse = [&](const char* what) { throw std::invalid_argument(std::string(op) + ": on an NPU " + what); };
  if (args.code != Code::int8) refuse("dtype must be int8");
  if (args.scales.type != ScaleType::f32 && args.scales.type != ScaleType::power)
    refuse("scale_dtype must be float32");
}

void quantize(const QuantizeArgs& args, int device) {
  const Blocks& blocks = args.blocks;
  if (blocks.matrices.count * blocks.down * blocks.across == 0) return;
  const Chip chip = chip_of(device);
  const QuantTiling tiling = tile_quantize(args, chip);
  kernels.launch(device, {args.dtype, args.scales.type == ScaleType::power}, blocks_of(tiling, chip),
                 {args.x, args.codes, args.scales.data}, tiling);
}

}  // namespace deepinfer::npu
