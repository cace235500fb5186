#include "moe_dispatch.h"

#include "../cuda/quant_names.h"
#include "../jit/npu_launch.h"
#include "moe_dispatch_plan.h"

namespace deepinfer::npu {

namespace {

struct IdConfig {
  int wide;
};

jit::AscendSource describe_ids(const IdConfig& c, const char* name, std::vector<std::string> buffers) {
  jit::AscendSource source;
  source.name = name;
  source.header = "npu/expert_map_kernel.h";
  source.tiling = "ExpertMapTiling";
  source.buffers = std::move(buffers);
  source.facts = {{"wide", c.wide}};
  return source;
}
jit::AscendSource describe_count(const IdConfig& c) { return describe_ids(c, "expert_count", {"ids", "counts"}); }
jit::AscendSource describe_place(const IdConfig& c) {
  return describe_ids(c, "expert_place",
                      {"ids", "chunk_counts", "rows_to_slots", "slots_to_rows", "offsets", "counts"});
}
std::vector<IdConfig> id_samples() { return {{0}, {1}}; }

struct PermuteConfig {};

jit::AscendSource describe_permute(const PermuteConfig&) {
  jit::AscendSource source;
  source.name = "moe_permute";
  source.header = "npu/permute_kernel.h";
  source.tiling = "PermuteTiling";
  source.buffers = {"x", "map", "out"};
  return source;
}
std::vector<PermuteConfig> permute_samples() { return {{}}; }

struct PermuteScalesConfig {
  int bytes;
};

jit::AscendSource describe_permute_scales(const PermuteScalesConfig& c) {
  jit::AscendSource source;
  source.name = "moe_permute_scales";
  source.header = "npu/permute_scales_kernel.h";
  source.tiling = "PermuteScalesTiling";
  source.buffers = {"scales", "map", "out"};
  source.facts = {{"bytes", c.bytes}};
  return source;
}
std::vector<PermuteScalesConfig> permute_scales_samples() { return {{1}, {4}}; }

struct UnpermuteConfig {
  DType dtype, weights;
  Code code;
  int coded;
};

jit::AscendSource describe_unpermute(const UnpermuteConfig& c) {
  jit::AscendSource source;
  source.name = "moe_unpermute";
  source.header = "npu/unpermute_kernel.h";
  source.tiling = "UnpermuteTiling";
  source.buffers = {"y", "map", "weights", "row_scales", "out"};
  source.facts = {
      {"dtype", c.dtype}, {"weights", c.weights}, {"code", cuda::name_of(c.code)}, {"coded", c.coded}};
  return source;
}
std::vector<UnpermuteConfig> unpermute_samples() {
  return {{DType::bf16, DType::f32, Code::int8, 0},
          {DType::f16, DType::f16, Code::int8, 0},
          {DType::f32, DType::f32, Code::int8, 0},
          {DType::bf16, DType::f32, Code::e4m3, 1}};
}

jit::AscendKernels<IdConfig> count(describe_count, id_samples);
jit::AscendKernels<IdConfig> place(describe_place, id_samples);
jit::AscendKernels<PermuteConfig> permute(describe_permute, permute_samples);
jit::AscendKernels<PermuteScalesConfig> permute_scales(describe_permute_scales, permute_scales_samples);
jit::AscendKernels<UnpermuteConfig> unpermute(describe_unpermute, unpermute_samples);

}  // namespace

int64_t cores(int device) { return chip_of(device).cores; }
int64_t most_local_experts() { return kMostLocalExperts; }
int64_t most_choices() { return kMostChoices; }

void expert_map(const ExpertMapArgs& args, int32_t* counts_of_chunks, int device) {
  const ExpertMapTiling tiling = tile_expert_map(args, chip_of(device));
  const IdConfig config{args.wide_ids};
  count.launch(device, config, tiling.chunks, {args.ids, counts_of_chunks}, tiling);
  place.launch(device, config, tiling.chunks,
               {args.ids, counts_of_chunks, args.rows_to_slots, args.slots_to_rows, args.offsets, args.counts}, tiling);
}

void moe_permute(const MoePermuteArgs& args, int device) {
  const Chip chip = chip_of(device);
  const PermuteTiling tiling = tile_permute(args, chip);
  permute.launch(device, {}, blocks_of(tiling, chip), {args.x, args.rows_to_slots, args.out}, tiling);
}

void moe_permute_scales(const MoePermuteScalesArgs& args, int device) {
  if (args.column_stride == 1 && args.out_column_stride == 1 && args.out_row_stride == args.columns) {
    MoePermuteArgs rows{};
    rows.x = static_cast<const char*>(args.scales);
    rows.out = static_cast<char*>(args.out);
    rows.rows_to_slots = args.rows_to_slots;
    rows.row_bytes = args.columns * args.bytes;
    rows.row_stride = args.row_stride * args.bytes;
    rows.topk = args.topk;
    rows.rows = args.rows;
    rows.tokens = args.tokens;
    return moe_permute(rows, device);
  }
  const PermuteScalesTiling tiling = tile_permute_scales(args);
  permute_scales.launch(device, {args.bytes}, blocks_of(tiling, chip_of(device)),
                        {args.scales, args.rows_to_slots, args.out}, tiling);
}

void moe_unpermute(const MoeUnpermuteArgs& args, int device) {
  const Chip chip = chip_of(device);
  const UnpermuteTiling tiling = tile_unpermute(args, chip);
  const UnpermuteConfig config{args.dtype, args.weights ? args.weights_dtype : DType::f32,
                               args.coded ? Code::e4m3 : Code::int8, args.coded};
  unpermute.launch(device, config, blocks_of(tiling, chip),
                   {args.y, args.slots_to_rows, args.weights, args.row_scales, args.out}, tiling);
}

}  // namespace deepinfer::npu
