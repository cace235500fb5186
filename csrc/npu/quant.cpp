#include "quant.h"

#include <stdexcept>
#include <string>

#include "../cuda/quant_names.h"
#include "../jit/npu_launch.h"
#include "quant_plan.h"

namespace deepinfer::npu {

namespace {

struct QuantizeConfig {
  DType dtype;
  Code code;
  ScaleType scale;
  int given;
};

// What all kernels of the family have in common.
template <typename Config>
jit::AscendSource describe(const Config& c, const char* name, const char* header) {
  jit::AscendSource source;
  source.name = name;
  source.header = header;
  source.tiling = "QuantTiling";
  source.facts = {{"dtype", c.dtype}, {"code", cuda::name_of(c.code)}, {"scale", cuda::name_of(c.scale)}};
  if constexpr (requires { c.given; }) {
    source.buffers = {"x", "codes", "scales"};
    source.facts.push_back({"given", c.given});
  } else {
    source.buffers = {"codes", "scales", "out"};
  }
  return source;
}
jit::AscendSource describe_blocks(const QuantizeConfig& c) { return describe(c, "quantize", "npu/quant_kernel.h"); }
jit::AscendSource describe_columns(const QuantizeConfig& c) {
  return describe(c, "quantize_columns", "npu/quant_columns_kernel.h");
}

std::vector<QuantizeConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  return {{bf16, Code::int8, ScaleType::f32, 0}, {f32, Code::int8, ScaleType::power, 0},
          {f16, Code::int8, ScaleType::f32, 1},  {bf16, Code::e4m3, ScaleType::f32, 0},
          {f32, Code::e4m3, ScaleType::e8m0, 1}, {bf16, Code::e2m1, ScaleType::packed, 0}};
}

struct DequantizeConfig {
  DType dtype;
  Code code;
  ScaleType scale;
};

jit::AscendSource describe_back(const DequantizeConfig& c) {
  return describe(c, "dequantize", "npu/dequant_kernel.h");
}
jit::AscendSource describe_columns_back(const DequantizeConfig& c) {
  return describe(c, "dequantize_columns", "npu/quant_columns_kernel.h");
}

std::vector<DequantizeConfig> samples_back() {
  return {{DType::bf16, Code::int8, ScaleType::f32},
          {DType::f32, Code::e4m3, ScaleType::e8m0},
          {DType::bf16, Code::e2m1, ScaleType::packed}};
}

jit::AscendKernels<QuantizeConfig> by_block(describe_blocks, samples);
jit::AscendKernels<QuantizeConfig> by_column(describe_columns, samples);
jit::AscendKernels<DequantizeConfig> back_by_block(describe_back, samples_back);
jit::AscendKernels<DequantizeConfig> back_by_column(describe_columns_back, samples_back);

bool is_empty(const Blocks& blocks) { return blocks.matrices.count * blocks.down * blocks.across == 0; }

}  // namespace

void check_codes(const char* op, Code code, ScaleType scales, int device) {
  if (jit::npu_facts(device).arch >= 3510) return;
  const auto refuse = [&](const char* what) {
    throw std::invalid_argument(std::string(op) + ": on an NPU without float8 (before the 950) " + what);
  };
  if (code != Code::int8) refuse("dtype must be int8");
  if (scales != ScaleType::f32 && scales != ScaleType::power) refuse("scale_dtype must be float32");
}

void quantize(const QuantizeArgs& args, int device) {
  if (is_empty(args.blocks)) return;
  const Chip chip = chip_of(device);
  const QuantTiling tiling = tile_quantize(args, chip);
  const QuantizeConfig config{args.dtype, args.code, args.scales.type, args.given};
  (args.blocks.block_columns == 1 ? by_column : by_block)
      .launch(device, config, blocks_of(tiling, chip), {args.x, args.codes, args.scales.data}, tiling);
}

void dequantize(const DequantizeArgs& args, int device) {
  if (is_empty(args.blocks)) return;
  const Chip chip = chip_of(device);
  const QuantTiling tiling = tile_dequantize(args, chip);
  (args.blocks.block_columns == 1 ? back_by_column : back_by_block)
      .launch(device, {args.dtype, args.code, args.scales.type}, blocks_of(tiling, chip),
              {args.codes, args.scales.data, args.out}, tiling);
}

}  // namespace deepinfer::npu
