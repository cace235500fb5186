#include "moe_dispatch.h"

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

struct UnpermuteConfig {
  DType dtype, weights;
};

jit::AscendSource describe_unpermute(const UnpermuteConfig& c) {
  jit::AscendSource source;
  source.name = "moe_unpermute";
  source.header = "npu/unpermute_kernel.h";
  source.tiling = "UnpermuteTiling";
  source.buffers = {"y", "map", "weights", "out"};
  source.facts = {{"dtype", c.dtype}, {"weights", c.weights}};
  return source;
}
std::vector<UnpermuteConfig> unpermute_samples() {
  return {{DType::bf16, DType::f32}, {DType::f16, DType::f16}, {DType::f32, DType::f32}};
}

jit::AscendKernels<IdConfig> count(describe_count, id_samples);
jit::AscendKernels<IdConfig> place(describe_place, id_samples);
jit::AscendKernels<PermuteConfig> permute(describe_permute, permute_samples);
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

void moe_unpermute(const MoeUnpermuteArgs& args, int device) {
  const Chip chip = chip_of(device);
  const UnpermuteTiling tiling = tile_unpermute(args, chip);
  unpermute.launch(device, {args.dtype, args.weights ? args.weights_dtype : DType::f32}, blocks_of(tiling, chip),
                   {args.y, args.slots_to_rows, args.weights, args.out}, tiling);
}

}  // namespace deepinfer::npu
