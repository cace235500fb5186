#include "rope.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "norm.h"
#include "rope_config.h"

namespace deepinfer::cuda {

static const char* name_of(RopeStyle style) {
  switch (style) {
    case RopeStyle::half: return "RopeStyle::half";
    case RopeStyle::interleaved: return "RopeStyle::interleaved";
    case RopeStyle::interleaved_to_half: return "RopeStyle::interleaved_to_half";
  }
  return "";
}

namespace {

constexpr int64_t kThreadsToFill = 512;  // a processor: no more rows a thread before there are as many threads

jit::KernelSource describe(const RopeConfig& c) {
  jit::KernelSource source;
  source.name = "rotary_embedding";
  source.header = "cuda/rope.cuh";
  source.config = "RopeConfig";
  source.args = "RopeArgs";
  source.facts = {{"x", c.x},
                  {"table", c.table},
                  {"style", name_of(c.style)},
                  {"head_size", c.head_size},
                  {"rotary_dim", c.rotary_dim},
                  {"round_products", c.round_products},
                  {"per_pair", c.per_pair},
                  {"position_bytes", c.position_bytes},
                  {"access", c.access},
                  {"table_access", c.table_access},
                  {"lanes", c.lanes},
                  {"heads", c.heads},
                  {"rest", c.rest},
                  {"apart", c.apart},
                  {"strided", c.strided},
                  {"wide", c.wide},
                  {"exchange", c.exchange},
                  {"ordered", c.ordered},
                  {"normed", c.normed},
                  {"form", name_of(c.form)},
                  {"weight", c.weight},
                  {"weight_access", c.weight_access},
                  {"slot_bytes", c.slot_bytes},
                  {"value_access", c.value_access},
                  {"value_lanes", c.value_lanes}};
  source.threads = kRopeThreads;
  source.pdl = true;
  return source;
}

// Elements of x in one load, and pairs of one piece.
int widest(const RopeConfig& c) { return 16 / size_of(c.x); }
int pairs_of_piece(const RopeConfig& c) {
  return c.style == RopeStyle::half && !c.exchange ? widest(c) : widest(c) / 2;
}

// Rows that a thread holds, as registers allow: more where it has less of each, or where a norm costs instructions.
int most_heads(const RopeConfig& c) {
  return c.style != RopeStyle::half || (c.exchange && c.normed) ? 4 : 2;
}

// Columns of a table that are read together.
int columns_of_piece(const RopeConfig& c) {
  return pairs_of_piece(c) * (c.exchange || (c.style == RopeStyle::interleaved && !c.per_pair) ? 2 : 1);
}

int lanes_of(const RopeConfig& c) {
  const int64_t n = pairs_of_piece(c);
  const int64_t pieces = ceil_div(c.rotary_dim / 2, n) + (c.rest ? ceil_div(c.head_size - c.rotary_dim, 2 * n) : 0);
  if (c.ordered || c.normed) return int(std::bit_ceil(uint64_t(pieces)));
  if (!c.exchange) return int(pieces);
  const int64_t turned = c.rotary_dim / (2 * n);  // a power of two: they find each other if every row starts at one
  return int(ceil_div(pieces, turned) * turned);
}

// Where half a row is shorter than a cache line, one thread for both halves would have each line moved in two parts.
bool exchanges(RopeConfig c) {
  constexpr int kLine = 128, kWarp = 32;
  const int parts = c.rotary_dim / widest(c);
  if (c.style != RopeStyle::half || c.rotary_dim / 2 * size_of(c.x) >= kLine) return false;
  if (c.rotary_dim % (2 * widest(c)) != 0 || !std::has_single_bit(unsigned(parts))) return false;
  c.exchange = 1;
  return lanes_of(c) <= kWarp;
}

void limit(Access& access, const RopeTensor& x, int element_size) {
  access.limit(x.in, x.in_groups, element_size);
  access.limit(x.in, x.in_rows, element_size);
  access.limit(x.out, x.out_groups, element_size);
  access.limit(x.out, x.out_rows, element_size);
  if (x.rest_size == 0) return;
  access.limit(x.rest, x.rest_groups, element_size);
  access.limit(x.rest, x.rest_rows, element_size);
  access.limit(x.rest_out, element_size);
}

int access_of(const RopeArgs& args, const RopeConfig& c) {
  Access access(c.style == RopeStyle::half ? c.rotary_dim / 2 : c.rotary_dim, widest(c));
  if (c.rest) access.divide(c.head_size - c.rotary_dim);
  for (const RopeTensor& x : args.tensors) limit(access, x, size_of(c.x));
  access.limit_stride(args.cache.key_stride, size_of(c.x));
  return access.elements();
}

int table_access_of(const RopeArgs& args, const RopeConfig& c) {
  const int element_size = size_of(c.table), columns = columns_of_piece(c);
  Access access(columns == 2 * pairs_of_piece(c) ? c.rotary_dim : c.rotary_dim / 2,
                std::min(columns, 16 / element_size));
  for (const RopeTensor& x : args.tensors)
    for (const RopeTable* table : {&x.cos, &x.sin}) {
      if (!table->data) continue;
      if (table->column_stride != 1) return 0;
      access.limit(table->data, table->groups, element_size);
      access.limit_stride(table->row_stride, element_size);
    }
  return access.elements();
}

int weight_access_of(const RopeArgs& args, const RopeConfig& c) {
  Access access(widest(c), 16 / size_of(c.weight));
  for (const void* weight : args.norm.weights) access.limit(weight, size_of(c.weight));
  return access.elements();
}

int value_access_of(const RopeCache& cache, const RopeConfig& c) {
  Access access(cache.value_size, widest(c));
  access.limit(cache.values, size_of(c.x));
  access.limit(cache.value_cache, size_of(c.x));
  for (const auto& strides : {cache.in_strides, cache.out_strides})
    for (int d = 0; d < 3; ++d) access.limit_stride(strides[d], size_of(c.x));
  return access.elements();
}

bool is_strided(const RopeTensor& x) {
  const int dims =
      std::max({x.in_groups.dims, x.in_rows.dims, x.out_groups.dims, x.out_rows.dims, x.cos.groups.dims,
                x.sin.groups.dims, x.position_groups.dims, x.rest_groups.dims, x.rest_rows.dims});
  return dims > 1;
}

// Of q, of k or of v.
int64_t threads_of(const RopeConfig& c, const RopeArgs& args, int i) {
  if (i == 2) return args.rows[2] * c.value_lanes;
  if (args.rows[i] == 0) return 0;
  const RopeTensor& x = args.tensors[i];
  return x.in_groups.count * ceil_div(x.in_rows.count, c.heads) * c.lanes;
}

RopeConfig plan(const RopeArgs& args, int device) {
  RopeConfig c{};
  c.x = args.dtype;
  c.table = args.table_dtype;
  c.style = args.style;
  c.rotary_dim = int(args.rotary_dim);
  c.round_products = args.round_products;
  c.per_pair = args.columns != args.rotary_dim;
  c.position_bytes = !args.positions ? 0 : args.wide_positions ? 8 : 4;
  int64_t most_rows = 1;
  for (const RopeTensor& x : args.tensors) {
    if (!x.in) continue;
    const bool in_place = x.in == x.out;
    c.rest |= !in_place && args.rotary_dim < args.head_size;
    c.ordered |= in_place && c.style == RopeStyle::interleaved_to_half;
    c.strided |= is_strided(x);
    most_rows = std::max(most_rows, x.in_rows.count);
  }
  c.apart = args.apart && c.rest;
  c.head_size = int(c.rest ? args.head_size : args.rotary_dim);
  c.exchange = exchanges(c);
  c.access = access_of(args, c);
  c.table_access = table_access_of(args, c);
  c.normed = args.normed;
  c.weight = args.dtype;
  if (c.normed) {
    c.form = args.norm.form;
    c.weight = args.norm.weight_dtype;
    c.weight_access = weight_access_of(args, c);
  }
  if (args.cache.slots) {
    c.slot_bytes = args.cache.wide_slots ? 8 : 4;
    c.strided |= args.cache.slot_groups.dims > 1;
    c.value_access = value_access_of(args.cache, c);
    c.value_lanes = int(ceil_div(args.cache.value_size, widest(c)));
  }
  c.lanes = lanes_of(c);
  c.wide = std::max({args.rows[0] * c.lanes, args.rows[1] * c.lanes, args.rows[2] * c.value_lanes}) > INT32_MAX;
  // Few tokens are spread over more threads.
  const int64_t enough = jit::device_facts(device).multiprocessors * kThreadsToFill;
  const int most = most_heads(c);
  for (c.heads = 1; c.heads < most && 2 * c.heads <= most_rows; c.heads *= 2)
    if (threads_of(c, args, 0) + threads_of(c, args, 1) < 2 * enough) break;
  return c;
}

RopeConfig sample(RopeStyle style, DType x, DType table, int head_size, int rotary_dim) {
  RopeConfig c{};
  c.x = x;
  c.table = table;
  c.style = style;
  c.head_size = head_size;
  c.rotary_dim = rotary_dim;
  c.round_products = x != DType::f32 && table == x;
  c.per_pair = 1;
  c.position_bytes = 8;
  c.rest = rotary_dim < head_size;
  c.exchange = exchanges(c);
  c.access = widest(c);
  c.table_access = std::min(columns_of_piece(c), 16 / size_of(table));
  c.heads = most_heads(c);
  c.weight = x;
  c.lanes = lanes_of(c);
  return c;
}

std::vector<RopeConfig> samples() {
  constexpr RopeStyle styles[] = {RopeStyle::half, RopeStyle::interleaved, RopeStyle::interleaved_to_half};
  std::vector<RopeConfig> configs;
  for (RopeStyle style : styles)
    for (int heads : {1, 4}) {
      RopeConfig c = sample(style, DType::bf16, DType::bf16, 64, 64);
      c.heads = std::min(heads, most_heads(c));
      configs.push_back(c);
    }
  // In place with pairs read and halves written, by a warp and by a block.
  for (int head_size : {64, 512}) {
    RopeConfig c = sample(RopeStyle::interleaved_to_half, DType::bf16, DType::f32, head_size, head_size);
    c.ordered = 1;
    c.lanes = lanes_of(c);
    configs.push_back(c);
  }
  // As transformers calls it: a column an element, cosines of their own for each row, heads not innermost.
  RopeConfig eager = sample(RopeStyle::half, DType::bf16, DType::bf16, 128, 128);
  eager.per_pair = eager.position_bytes = 0;
  eager.strided = 1;
  configs.push_back(eager);
  // The heads of latent attention, whose keys have the rest elsewhere.
  for (RopeStyle style : styles) {
    RopeConfig c = sample(style, DType::bf16, DType::bf16, 192, 64);
    c.apart = c.strided = 1;
    c.position_bytes = 0;
    configs.push_back(c);
  }
  // The parts of a complex tensor.
  RopeConfig complex = sample(RopeStyle::interleaved, DType::bf16, DType::f32, 64, 64);
  complex.position_bytes = complex.table_access = 0;
  configs.push_back(complex);
  // Normed first, as transformers calls it; then heads that rotate in part.
  RopeConfig normed = eager;
  normed.normed = 1;
  normed.weight_access = 8;
  configs.push_back(normed);
  for (RopeStyle style : styles) {
    RopeConfig c = sample(style, DType::bf16, DType::f32, 80, 48);
    c.normed = 1;
    c.form = WeightForm::one_plus;
    c.weight = DType::f32;
    c.weight_access = 4;
    c.lanes = lanes_of(c);
    configs.push_back(c);
  }
  // Decoding behind a cache, with and without norms.
  for (RopeConfig c : {eager, normed}) {
    c.slot_bytes = 8;
    c.value_access = 8;
    c.value_lanes = 16;
    configs.push_back(c);
  }
  // Part of a head, and more rows than 32 bits count; then the other types, misaligned, with a column an element.
  RopeConfig partial = sample(RopeStyle::half, DType::f16, DType::f32, 128, 64);
  partial.wide = 1;
  configs.push_back(partial);
  for (RopeStyle style : styles) {
    RopeConfig c = sample(style, DType::f32, DType::f16, 80, 50);
    c.per_pair = 0;
    c.position_bytes = 4;
    c.access = c.table_access = 1;
    c.strided = 1;
    configs.push_back(c);
  }
  return configs;
}

jit::Kernels<RopeConfig> kernels(describe, samples);

}  // namespace

void rotary_embedding(const RopeArgs& args, int device) {
  const RopeConfig config = plan(args, device);
  int64_t blocks = 0;
  for (int i : {0, 1, 2}) blocks += ceil_div(threads_of(config, args, i), kRopeThreads);
  kernels.launch(device, config, {unsigned(blocks)}, args);
}

bool reads_whole_rows(const RopeArgs& args) {
  RopeConfig c{};
  c.x = args.dtype;
  c.style = args.style;
  c.head_size = int(args.head_size);
  c.rotary_dim = int(args.rotary_dim);
  c.rest = c.rotary_dim < c.head_size;  // if the other tensor is not in place
  c.ordered = 1;
  return lanes_of(c) <= kRopeThreads;
}

bool norms_rows(const RopeArgs& args) {
  RopeConfig c{};
  c.x = args.dtype;
  c.style = args.style;
  c.head_size = int(args.head_size);
  c.rotary_dim = int(args.rotary_dim);
  c.rest = c.rotary_dim < c.head_size;
  c.normed = 1;
  // Every piece consists of the 16 bytes that the norm kernel sums at a time.
  const int part = widest(c), piece = c.style == RopeStyle::half ? 2 * part : part;
  return c.rotary_dim % piece == 0 && (c.head_size - c.rotary_dim) % part == 0 && lanes_of(c) <= 32;
}

}  // namespace deepinfer::cuda
