#include "attention_prefill.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "../jit/tensor_map.h"
#include "attention_prefill_config.h"
#include "launch.h"

namespace deepinfer::cuda {

namespace {

// As in attention_prefill.cuh.
constexpr int kTile = 128, kStages = 2, kPiece = 64, kThreads = 384;

jit::KernelSource describe(const AttentionPrefillConfig& c) {
  jit::KernelSource source;
  source.name = "attention_prefill";
  source.header = "cuda/attention_prefill.cuh";
  source.config = "AttentionPrefillConfig";
  source.args = "AttentionPrefillArgs";
  source.facts = {
      {"type", c.type}, {"depth", c.depth}, {"value_depth", c.value_depth}, {"rope_depth", c.rope_depth}, {"causal", c.causal}};
  source.threads = kThreads;
  source.blocks_per_sm = 1;
  source.shared_bytes = 1024 + 2 * kTile * (c.depth + kStages * (c.depth + c.value_depth)) + 8 * (2 + 4 * kStages);
  source.pdl = true;
  return source;
}

std::vector<AttentionPrefillConfig> samples() {
  return {{DType::bf16, 192, 128, 0, 1},
          {DType::bf16, 192, 128, 64, 1},
          {DType::bf16, 128, 128, 0, 1},
          {DType::f16, 64, 64, 0, 0}};
}

jit::Kernels<AttentionPrefillConfig> kernels(describe, samples);

bool takes_heads(int64_t depth, int64_t value_depth) {
  return (depth == value_depth && (depth == 64 || depth == 128)) || (depth == 192 && value_depth == 128);
}

// [batch, heads, tokens, size] of 16-bit elements.
struct Heads {
  const void* data;
  HeadStrides strides;
  int64_t batch, heads, tokens, size;
};

// A stride of a dimension with one element says nothing.
bool suits_copy_engine(const Heads& t) {
  const auto suits = [](int64_t size, int64_t stride) {
    return size == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t(1) << 38);
  };
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && suits(t.batch, t.strides.batch) &&
         suits(t.heads, t.strides.head) && suits(t.tokens, t.strides.token);
}

TensorMap map_of(const Heads& t, DType type, const char* what) {
  const auto bytes = [&t](int64_t size, int64_t stride) { return uint64_t(2 * (size == 1 ? t.size : stride)); };
  jit::TensorMapSpec spec{};
  spec.type = type == DType::bf16 ? jit::TensorMapType::bf16 : jit::TensorMapType::f16;
  spec.rank = 4;
  spec.address = const_cast<void*>(t.data);
  spec.sizes[0] = uint64_t(t.size);
  spec.sizes[1] = uint64_t(t.tokens);
  spec.sizes[2] = uint64_t(t.heads);
  spec.sizes[3] = uint64_t(t.batch);
  spec.strides[0] = bytes(t.tokens, t.strides.token);
  spec.strides[1] = bytes(t.heads, t.strides.head);
  spec.strides[2] = bytes(t.batch, t.strides.batch);
  spec.box[0] = kPiece;
  spec.box[1] = kTile;
  spec.box[2] = spec.box[3] = 1;
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, what);
}

// Columns elsewhere are whole pieces behind whole pieces.
bool suits_rope(const AttentionArgs& args, const Heads& query, const Heads& key) {
  return args.depth % kPiece == 0 && args.rope_depth % kPiece == 0 && suits_copy_engine(query) &&
         suits_copy_engine(key);
}

// As many heads as have their keys and values in half of the L2 cache, whole groups and sections of about equal size.
int section_of(const AttentionArgs& args, int64_t l2_bytes) {
  const int64_t shared = args.batch * args.key_heads, group = args.heads / args.key_heads;
  const int64_t bytes = shared * args.keys * (args.depth + args.value_depth) * 2;
  const int64_t sections = std::min(ceil_div(bytes, l2_bytes / 2), shared);
  return int(ceil_div(shared, sections) * group);
}

}  // namespace

bool attention_prefill(const AttentionArgs& args, int device) {
  const jit::DeviceFacts& facts = jit::device_facts(device);
  const bool causal = args.mask_kind == AttentionMask::causal;
  // Keys that no query sees are not looked at, whatever they hold.
  const int64_t keys = causal ? std::min(args.keys, args.queries) : args.keys;
  const Heads query{args.query, args.query_strides, args.batch, args.heads, args.queries, args.depth};
  const Heads key{args.key, args.key_strides, args.batch, args.key_heads, keys, args.depth};
  const Heads value{args.value, args.value_strides, args.batch, args.key_heads, keys, args.value_depth};
  const bool rope_of_all = args.key_rope_strides.head == 0;
  const Heads query_rope{args.query_rope, args.query_rope_strides, args.batch, args.heads, args.queries,
                         args.rope_depth};
  const Heads key_rope{args.key_rope, args.key_rope_strides, args.batch, rope_of_all ? 1 : args.key_heads, keys,
                       args.rope_depth};
  const int64_t depth = args.depth + args.rope_depth;
  const int64_t heads = args.batch * args.heads, items = heads * ceil_div(args.queries, kTile);
  constexpr int64_t most = int64_t(1) << 30;  // indices are 32 bits
  if (facts.capability != 90 || args.type == DType::f32 || !takes_heads(depth, args.value_depth) ||
      !(causal || args.mask_kind == AttentionMask::none) || !(args.scale > 0) || keys == 0 || items > most ||
      keys > most || !suits_copy_engine(query) || !suits_copy_engine(key) || !suits_copy_engine(value) ||
      (args.rope_depth > 0 && !suits_rope(args, query_rope, key_rope)))
    return false;
  AttentionPrefillArgs kernel_args{};
  kernel_args.query = map_of(query, args.type, "the queries of attention");
  kernel_args.key = map_of(key, args.type, "the keys of attention");
  kernel_args.value = map_of(value, args.type, "the values of attention");
  if (args.rope_depth > 0) {
    kernel_args.query_rope = map_of(query_rope, args.type, "the rotated columns of queries");
    kernel_args.key_rope = map_of(key_rope, args.type, "the rotated columns of keys");
    kernel_args.rope_of_all = rope_of_all;
  }
  kernel_args.problem = args;
  kernel_args.problem.keys = keys;
  kernel_args.section = section_of(args, facts.l2_bytes);
  const AttentionPrefillConfig config{args.type, int(depth), int(args.value_depth), int(args.rope_depth), causal};
  kernels.launch(device, config, {unsigned(std::min<int64_t>(items, facts.multiprocessors))}, kernel_args);
  return true;
}

}  // namespace deepinfer::cuda
