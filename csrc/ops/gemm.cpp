// grouped_mm and fused_experts: schemas, argument checks, the plan of work, outputs.

#include "../cpu/gemm.h"

#include <cstring>
#include <limits>
#include <vector>

#include "../cpu/moe_dispatch.h"
#include "../cpu/parallel.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a kernel may read past the end of the scratch for products and biases: a whole vector of both halves.
constexpr int64_t kReadAhead = 128;

int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The storage of offsets or ids, which the kernels read as int32 or int64.
Tensor dense(const Tensor& t) { return torch::stable::contiguous(t); }

void check_like_x(const char* op, const char* argument, const Tensor& t, const Tensor& x) {
  DI_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", argument, " must have the dtype of x, ",
           name_of(x.scalar_type()), ", got ", name_of(t.scalar_type()));
  check_same_device(op, argument, t, x);
}

void check_bias(const char* op, const char* argument, const std::optional<Tensor>& bias, const Tensor& x,
                int64_t experts, int64_t columns) {
  if (!bias) return;
  DI_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == columns, op, ": ", argument,
           " must have shape [", experts, ", ", columns, "], got ", shape_of(*bias));
  check_like_x(op, argument, *bias, x);
}

// Bytes of an element of x in a packed row: only the AVX-512 kernel multiplies bf16 as such, all else is float32.
int64_t packed_size(DType dtype) { return dtype == DType::bf16 && cpu::isa() == cpu::Isa::avx512 ? 2 : 4; }

// The most rows of a block: such that they take about half of a 1 MB L2 cache when packed. Weights that have to be copied
// are copied for each block, which is worth more rows than that.
int64_t most_block_rows(const GroupedGemmArgs& args) {
  const int64_t row_bytes = std::max<int64_t>(1, args.depth * packed_size(args.dtype));
  return std::clamp<int64_t>(round_up(512 * 1024 / row_bytes, 4), args.depth_stride == 1 ? 32 : 256, 256);
}

// Cuts the rows of each expert, [ends[e - 1], ends[e]), into blocks of nearly the same size.
std::vector<RowBlock> row_blocks(const int32_t* ends, int64_t experts, int64_t max_rows) {
  std::vector<RowBlock> blocks;
  int64_t begin = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t end = ends[expert], rows = end - begin;
    if (rows > 0) {
      const int64_t parts = (rows + max_rows - 1) / max_rows, size = round_up((rows + parts - 1) / parts, 4);
      for (; begin < end; begin += size) blocks.push_back({expert, begin, std::min(size, end - begin)});
    }
    begin = end;
  }
  return blocks;
}

// The row and column strides of the weight are given as [expert, column, k].
void set_weight(GroupedGemmArgs& args, const Tensor& weight, int column_dim, int depth_dim) {
  args.weight = weight.const_data_ptr();
  args.expert_stride = weight.stride(0);
  args.column_stride = weight.stride(column_dim);
  args.depth_stride = weight.size(depth_dim) == 1 ? 1 : weight.stride(depth_dim);
}

void set_bias(GroupedGemmArgs& args, const std::optional<Tensor>& bias) {
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.bias_stride = bias ? bias->stride(0) : 0;
}

std::optional<Tensor> with_dense_rows(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(deepinfer::with_dense_rows(*t)) : std::nullopt;
}

// The columns of one item of work.
int64_t chunk_columns(const GroupedGemmArgs& args, int64_t column_bytes, int64_t most_rows, int64_t threads) {
  int64_t tiles;
  if (args.depth_stride == 1) {
    // About 256 KB of weights: long enough to stream, short enough to balance.
    tiles = std::clamp<int64_t>(256 * 1024 / column_bytes / cpu::kColumnTile, 1, 16);
  } else {
    // Columns are not dense, rows may be: the longer the pieces the faster they come out of memory, which is what few
    // rows of x wait for; but four items a thread.
    const int64_t most_tiles = most_rows <= 32 ? 80 : 16;
    tiles = std::clamp<int64_t>(args.columns * args.block_count / (4 * threads) / cpu::kColumnTile, 16, most_tiles);
  }
  return std::min(tiles * cpu::kColumnTile, round_up(args.columns, cpu::kColumnTile));
}

// Runs the product over the rows that end at ends[expert]; x, weight, bias, out, sizes and gate are set already.
void run(GroupedGemmArgs& args, const Tensor& like, const int32_t* ends, int64_t experts) {
  const auto blocks = row_blocks(ends, experts, most_block_rows(args));
  if (blocks.empty() || args.columns == 0) return;
  int64_t most_rows = 0;
  for (const RowBlock& block : blocks) most_rows = std::max(most_rows, block.rows);
  args.blocks = blocks.data();
  args.block_count = int64_t(blocks.size());

  const int64_t threads = torch::stable::get_num_threads(), halves = args.gated ? 2 : 1;
  const int64_t column_bytes = std::max<int64_t>(1, args.depth * element_size(args.dtype) * halves);
  args.chunk = chunk_columns(args, column_bytes, most_rows, threads);
  const int64_t items = args.block_count * ((args.columns + args.chunk - 1) / args.chunk);
  const int64_t workers = std::min(items, threads);
  args.packed_bytes = most_rows * round_up(args.depth, 32) * packed_size(args.dtype);
  args.bias_bytes = round_up(args.chunk * halves * 4, 64) + kReadAhead;
  args.product_bytes = most_rows * round_up(args.chunk * halves * 4, 64) + kReadAhead;
  args.scratch_bytes = args.packed_bytes + args.product_bytes + args.bias_bytes;
  if (args.depth_stride != 1) {
    args.copy_stride = round_up(args.depth, 32) + 32;  // no power of two: columns would compete for one set of a cache
    args.scratch_bytes += args.chunk * halves * args.copy_stride * element_size(args.dtype);
  }
  Tensor scratch = new_tensor(like, {workers * args.scratch_bytes}, ScalarType::Byte);
  args.scratch = scratch.mutable_data_ptr();
  int64_t next_item = 0;
  args.next_item = &next_item;
  cpu::parallel(cpu::grouped_gemm, args, workers, items * args.chunk * column_bytes);
}

Tensor grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias) {
  const char* op = "grouped_mm";
  DI_CHECK(x.dim() == 2, op, ": x must have shape [P, K], got ", shape_of(x));
  GroupedGemmArgs args{};
  args.dtype = float_dtype(op, "x", x);
  const int64_t rows = x.size(0);
  args.depth = x.size(1);
  DI_CHECK(weight.dim() == 3 && weight.size(1) == args.depth, op, ": weight must have shape [E, ", args.depth,
           ", N], got ", shape_of(weight));
  check_like_x(op, "weight", weight, x);
  const int64_t experts = weight.size(0);
  args.columns = weight.size(2);
  DI_CHECK(offsets.scalar_type() == ScalarType::Int, op, ": offsets must be int32, got ",
           name_of(offsets.scalar_type()));
  DI_CHECK(offsets.dim() == 1 && offsets.size(0) == experts, op, ": offsets must have shape [", experts, "], got ",
           shape_of(offsets));
  check_same_device(op, "offsets", offsets, x);
  check_bias(op, "bias", bias, x, experts, args.columns);

  const Tensor dense_offsets = dense(offsets);
  const int32_t* ends = static_cast<const int32_t*>(dense_offsets.const_data_ptr());
  int64_t last = 0;
  for (int64_t e = 0; e < experts; ++e) {
    DI_CHECK(ends[e] >= last, op, ": offsets must be ascending and not negative, got ", ends[e], " after ", last);
    last = ends[e];
  }
  DI_CHECK(last <= rows, op, ": offsets must not exceed the ", rows, " rows of x, got ", last);

  Tensor out = new_tensor(x, {rows, args.columns}, x.scalar_type());
  const int64_t row_bytes = args.columns * element_size(args.dtype);
  args.out = out.mutable_data_ptr();
  std::memset(static_cast<char*>(args.out) + last * row_bytes, 0, (rows - last) * row_bytes);
  const Tensor dense_x = deepinfer::with_dense_rows(x);
  args.x = dense_x.const_data_ptr();
  args.x_stride = dense_x.stride(0);
  set_weight(args, weight, 2, 1);
  const auto dense_bias = with_dense_rows(bias);
  set_bias(args, dense_bias);
  run(args, x, ends, experts);
  return out;
}

// silu with alpha or up_offset in use is another form: it rounds more often.
Gated form_of(const char* op, const std::string& activation, double alpha, double up_offset) {
  if (activation == "silu") return alpha == 1 && up_offset == 0 ? Gated::silu : Gated::swish;
  if (activation == "gelu") return Gated::gelu;
  if (activation == "gelu_tanh") return Gated::gelu_tanh;
  fail(op, ": activation must be silu, gelu or gelu_tanh, got ", activation);
}

// Where the slots (token, j) of the local experts go: rows sorted by expert, in slot order inside an expert.
struct ExpertRows {
  std::vector<int32_t> ends;           // by expert
  std::vector<int32_t> tokens;         // by row
  std::vector<int32_t> slots_to_rows;  // -1: no local expert
};

template <typename Id>
ExpertRows sort_slots(const char* op, const Tensor& topk_ids, int64_t first_expert, int64_t experts) {
  const Tensor dense_ids = dense(topk_ids);
  const Id* ids = static_cast<const Id*>(dense_ids.const_data_ptr());
  const int64_t topk = topk_ids.size(1), slots = topk_ids.size(0) * topk;
  ExpertRows map{std::vector<int32_t>(experts), {}, std::vector<int32_t>(slots, -1)};
  auto is_local = [&](Id id) { return id >= first_expert && id - first_expert < experts; };
  for (int64_t slot = 0; slot < slots; ++slot) {
    DI_CHECK(ids[slot] >= -1, op, ": topk_ids must not be below -1, got ", ids[slot]);
    if (is_local(ids[slot])) ++map.ends[ids[slot] - first_expert];
  }
  int32_t rows = 0;
  for (int32_t& end : map.ends) rows += std::exchange(end, rows);  // now the starts; filling makes them the ends
  map.tokens.resize(rows);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (!is_local(ids[slot])) continue;
    const int32_t row = map.ends[ids[slot] - first_expert]++;
    map.tokens[row] = int32_t(slot / topk);
    map.slots_to_rows[slot] = row;
  }
  return map;
}

Tensor fused_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& topk_ids,
                     const Tensor& topk_weights, const std::optional<Tensor>& gate_up_bias,
                     const std::optional<Tensor>& down_bias, const std::string& activation, bool interleaved,
                     std::optional<double> limit, double alpha, double up_offset, int64_t first_expert) {
  const char* op = "fused_experts";
  DI_CHECK(x.dim() == 2, op, ": x must have shape [T, H], got ", shape_of(x));
  GroupedGemmArgs first{};
  first.dtype = float_dtype(op, "x", x);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  DI_CHECK(gate_up.dim() == 3 && gate_up.size(1) % 2 == 0 && gate_up.size(2) == hidden, op,
           ": gate_up must have shape [E, 2 * I, ", hidden, "], got ", shape_of(gate_up));
  check_like_x(op, "gate_up", gate_up, x);
  const int64_t experts = gate_up.size(0), intermediate = gate_up.size(1) / 2;
  DI_CHECK(down.dim() == 3 && down.size(0) == experts && down.size(1) == hidden && down.size(2) == intermediate, op,
           ": down must have shape [", experts, ", ", hidden, ", ", intermediate, "], got ", shape_of(down));
  check_like_x(op, "down", down, x);
  DI_CHECK(topk_ids.scalar_type() == ScalarType::Int || topk_ids.scalar_type() == ScalarType::Long, op,
           ": topk_ids must be int32 or int64, got ", name_of(topk_ids.scalar_type()));
  DI_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == tokens, op, ": topk_ids must have shape [", tokens,
           ", k], got ", shape_of(topk_ids));
  check_same_device(op, "topk_ids", topk_ids, x);
  DI_CHECK(same_shape(topk_weights, topk_ids), op, ": topk_weights must have the shape of topk_ids, ",
           shape_of(topk_ids), ", got ", shape_of(topk_weights));
  const DType weights_dtype = float_dtype(op, "topk_weights", topk_weights);
  check_same_device(op, "topk_weights", topk_weights, x);
  check_bias(op, "gate_up_bias", gate_up_bias, x, experts, 2 * intermediate);
  check_bias(op, "down_bias", down_bias, x, experts, hidden);
  first.gated = true;
  first.form = form_of(op, activation, alpha, up_offset);
  DI_CHECK(activation == "silu" || (!limit && alpha == 1 && up_offset == 0), op,
           ": limit, alpha and up_offset need activation silu, got ", activation);
  DI_CHECK(!limit || *limit > 0, op, ": limit must be positive, got ", *limit);
  DI_CHECK(first_expert >= 0, op, ": first_expert must not be negative, got ", first_expert);
  const int64_t topk = topk_ids.size(1);
  DI_CHECK(tokens * topk <= std::numeric_limits<int32_t>::max(), op, ": more than 2^31 - 1 (token, expert) pairs");

  const ExpertRows map = topk_ids.scalar_type() == ScalarType::Int
                             ? sort_slots<int32_t>(op, topk_ids, first_expert, experts)
                             : sort_slots<int64_t>(op, topk_ids, first_expert, experts);
  const int64_t rows = int64_t(map.tokens.size());
  Tensor out = new_tensor(x, {tokens, hidden}, x.scalar_type());
  Tensor activated = new_tensor(x, {rows, intermediate}, x.scalar_type());
  Tensor y = new_tensor(x, {rows, hidden}, x.scalar_type());

  const Tensor dense_x = deepinfer::with_dense_rows(x);
  first.x = dense_x.const_data_ptr();
  first.x_stride = dense_x.stride(0);
  first.x_rows = map.tokens.data();
  set_weight(first, gate_up, 1, 2);
  const auto dense_gate_up_bias = with_dense_rows(gate_up_bias);
  set_bias(first, dense_gate_up_bias);
  first.out = activated.mutable_data_ptr();
  first.columns = intermediate;
  first.depth = hidden;
  first.interleaved = interleaved;
  first.limit = float(limit.value_or(std::numeric_limits<double>::infinity()));
  first.alpha = float(alpha);
  first.up_offset = float(up_offset);
  run(first, x, map.ends.data(), experts);

  GroupedGemmArgs second{};
  second.dtype = first.dtype;
  second.x = first.out;
  second.x_stride = intermediate;
  set_weight(second, down, 1, 2);
  const auto dense_down_bias = with_dense_rows(down_bias);
  set_bias(second, dense_down_bias);
  second.out = y.mutable_data_ptr();
  second.columns = hidden;
  second.depth = intermediate;
  run(second, x, map.ends.data(), experts);

  const Tensor dense_weights = dense(topk_weights);
  MoeUnpermuteArgs sum{};
  sum.y = second.out;
  sum.slots_to_rows = map.slots_to_rows.data();
  sum.weights = dense_weights.const_data_ptr();
  sum.out = out.mutable_data_ptr();
  sum.row_stride = sum.hidden_size = hidden;
  sum.topk = topk;
  sum.dtype = first.dtype;
  sum.weights_dtype = weights_dtype;
  cpu::parallel(cpu::moe_unpermute, sum, tokens, hidden * (topk + 1) * element_size(sum.dtype));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("grouped_mm(Tensor x, Tensor weight, Tensor offsets, Tensor? bias=None) -> Tensor");
  m.def(
      "fused_experts(Tensor x, Tensor gate_up, Tensor down, Tensor topk_ids, Tensor topk_weights, *, "
      "Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation=\"silu\", bool interleaved=False, "
      "float? limit=None, float alpha=1.0, float up_offset=0.0, int first_expert=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("fused_experts", TORCH_BOX(&fused_experts));
}

}  // namespace deepinfer
