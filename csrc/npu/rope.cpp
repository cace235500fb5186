#include "rope.h"

#include "../jit/npu_launch.h"
#include "rope_plan.h"

namespace deepinfer::npu {

namespace {

struct RopeConfig {
  DType dtype, table;
  RopeStyle style;
  int wide;
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
  source.buffers = {"in", "out", "cos", "sin", "positions"};
  source.facts = {{"dtype", c.dtype}, {"table", c.table}, {"style", name_of(c.style)}, {"wide", c.wide}};
  return source;
}

std::vector<RopeConfig> samples() {
  return {{DType::bf16, DType::bf16, RopeStyle::half, 0}, {DType::bf16, DType::f32, RopeStyle::interleaved, 1},
          {DType::f32, DType::f32, RopeStyle::interleaved_to_half, 0}};
}

jit::AscendKernels<RopeConfig> kernels(describe, samples);

}  // namespace

int64_t most_rope_size() { return kMostRopeSize; }

void rotary_embedding(const RopeArgs& args, int device) {
  const Chip chip = chip_of(device);
  const RopeConfig config{args.dtype, args.table_dtype, args.style, args.positions && args.wide_positions};
  for (int i = 0; i < 2; ++i) {
    const RopeTensor& x = args.tensors[i];
    if (args.rows[i] == 0) continue;
    const RopeTiling tiling = tile_rope(args, i, chip);
    kernels.launch(device, config, blocks_of(tiling, chip), {x.in, x.out, x.cos.data, x.sin.data, args.positions},
                   tiling);
  }
}

}  // namespace deepinfer::npu
