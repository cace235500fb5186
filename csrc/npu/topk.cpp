#include "topk.h"

#include "../jit/npu_launch.h"
#include "topk_plan.h"

namespace deepinfer::npu {

namespace {

struct TopkConfig {
  DType x;
  int wide, sorted, values, table;
};

jit::AscendSource describe(const TopkConfig& c) {
  jit::AscendSource source;
  source.name = "topk";
  source.header = "npu/topk_kernel.h";
  source.tiling = "TopkTiling";
  source.buffers = {"x", "lengths", "offsets", "table", "values", "indices"};
  source.facts = {
      {"x", c.x}, {"wide", c.wide}, {"sorted", c.sorted}, {"values", c.values}, {"table", c.table}};
  return source;
}

std::vector<TopkConfig> samples() {
  return {{DType::bf16, 0, 0, 0, 0}, {DType::bf16, 0, 0, 0, 1}, {DType::f32, 1, 1, 1, 0}, {DType::f16, 0, 1, 1, 0}};
}

jit::AscendKernels<TopkConfig> kernels(describe, samples);

}  // namespace

void topk(const TopkArgs& args, int device) {
  const Chip chip = chip_of(device);
  const TopkTiling tiling = tile_topk(args, chip);
  const TopkConfig config{args.dtype,
                          args.wide_index,
                          args.order == TopkOrder::by_value,
                          args.values != nullptr,
                          args.page_table != nullptr};
  kernels.launch(device, config, blocks_of(tiling, chip),
                 {args.x, args.lengths, args.offsets, args.page_table, args.values, args.indices}, tiling);
}

}  // namespace deepinfer::npu
