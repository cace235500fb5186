#include "rope.h"

#include "../cuda/norm.h"
#include "../jit/npu_launch.h"
#include "rope_plan.h"

namespace deepinfer::npu {

namespace {

struct RopeConfig {
  DType dtype, table;
  RopeStyle style;
  int wide, normed;
  DType weight;
  WeightForm form;
};

const char* name_of(RopeStyle style) {
  switch (style) {
    case RopeStyle::half: return "RopeStyle::half";
    case RopeStyle::interleaved: return "RopeStyle::interleaved";
    case RopeStyle::interleaved_to_half: return "RopeStyle::interleaved_to_half";
  }
  return "";
}

jit::AscendSource describe(const RopeConfig& c) {
  jit::AscendSource source;
  source.name = "rotary_embedding";
  source.header = "npu/rope_kernel.h";
  source.tiling = "RopeTiling";
  source.buffers = {"in", "out", "cos", "sin", "positions", "weight"};
  source.facts = {{"dtype", c.dtype}, {"table", c.table}, {"style", name_of(c.style)}, {"wide", c.wide},
                  {"normed", c.normed}, {"weight", c.weight}, {"form", cuda::name_of(c.form)}};
  return source;
}

std::vector<RopeConfig> samples() {
  constexpr DType bf16 = DType::bf16, f32 = DType::f32;
  return {{bf16, bf16, RopeStyle::half, 0, 0, bf16, WeightForm::none},
          {bf16, f32, RopeStyle::interleaved, 1, 0, bf16, WeightForm::none},
          {f32, f32, RopeStyle::interleaved_to_half, 0, 0, f32, WeightForm::none},
          {bf16, bf16, RopeStyle::half, 0, 1, bf16, WeightForm::cast_mul},
          {bf16, f32, RopeStyle::interleaved, 0, 1, f32, WeightForm::one_plus}};
}

jit::AscendKernels<RopeConfig> kernels(describe, samples);

}  // namespace

int64_t most_rope_size() { return kMostRopeSize; }

void rotary_embedding(const RopeArgs& args, int device) {
  const Chip chip = chip_of(device);
  RopeConfig config{args.dtype, args.table_dtype, args.style, args.positions && args.wide_positions,
                    0,          args.dtype,       WeightForm::none};
  if (args.normed) config.normed = 1, config.weight = args.norm.weight_dtype, config.form = args.norm.form;
  for (int i = 0; i < 2; ++i) {
    const RopeTensor& x = args.tensors[i];
    if (args.rows[i] == 0) continue;
    const RopeTiling tiling = tile_rope(args, i, chip);
    const void* weight = args.normed ? args.norm.weights[i] : nullptr;
    kernels.launch(device, config, blocks_of(tiling, chip),
                   {x.in, x.out, x.cos.data, x.sin.data, args.positions, weight}, tiling);
  }
}

}  // namespace deepinfer::npu
