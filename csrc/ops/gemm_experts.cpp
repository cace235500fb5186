// fused_experts: schema, argument checks, and the chain of kernels on each device.

#include <limits>

#include "../cpu/activation.h"
#include "../cpu/moe_dispatch.h"
#include "../cpu/parallel.h"
#include "../cuda/activation.h"
#include "../cuda/gemm.h"
#include "../cuda/moe_dispatch.h"
#include "expert_map.h"
#include "gemm_common.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr int64_t kActivationCost = 16;  // of an element of an activation, in bytes moved

// The storage of ids, which the kernels read as int32 or int64.
Tensor dense(const Tensor& t) { return torch::stable::contiguous(t); }

void check_bias(const char* op, const char* argument, const std::optional<Tensor>& bias, const Tensor& x,
                int64_t experts, int64_t columns) {
  if (!bias) return;
  DI_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == columns, op, ": ", argument,
           " must have shape [", experts, ", ", columns, "], got ", shape_of(*bias));
  check_like_x(op, argument, *bias, x);
}

void set_weight(GroupedGemmArgs& args, const Tensor& weight) {
  args.weight = weight.const_data_ptr();
  args.expert_stride = weight.stride(0);
  args.column_stride = weight.stride(1);
  args.depth_stride = weight.size(2) == 1 ? 1 : weight.stride(2);
}

void set_bias(GroupedGemmArgs& args, const std::optional<Tensor>& bias) {
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.bias_stride = bias ? bias->stride(0) : 0;
}

std::optional<Tensor> with_dense_rows(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(deepinfer::with_dense_rows(*t)) : std::nullopt;
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

  std::vector<RowBlock> groups() const {
    std::vector<RowBlock> groups;
    for (size_t e = 0; e < ends.size(); ++e) {
      const int64_t begin = e > 0 ? ends[e - 1] : 0;
      groups.push_back({int64_t(e), begin, ends[e] - begin});
    }
    return groups;
  }
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

// An expert that sees every token: [I, H], [I, H] and [H, I].
struct SharedExpert {
  Tensor gate, up, down;
};

// The inputs after the checks: rows are dense.
struct ExpertLayer {
  Tensor x, gate_up, down, topk_ids, topk_weights;
  std::optional<Tensor> gate_up_bias, down_bias;
  std::optional<SharedExpert> shared;
  Gated form;
  bool interleaved;
  float limit, alpha, up_offset;
  int64_t first_expert;
  DType dtype, weights_dtype;

  int64_t tokens() const { return x.size(0); }
  int64_t hidden() const { return x.size(1); }
  int64_t experts() const { return gate_up.size(0); }
  int64_t intermediate() const { return down.size(2); }
  int64_t topk() const { return topk_ids.size(1); }
  Tensor matrix(int64_t rows, int64_t columns) const { return new_tensor(x, {rows, columns}, x.scalar_type()); }
};

Tensor product(const Tensor& x, const Tensor& weight, DType dtype) {
  Tensor out = new_tensor(x, {x.size(0), weight.size(0)}, x.scalar_type());
  const Tensor x_operand = as_tokens(x), weight_operand = as_operand(weight);
  MatmulArgs args{};
  set_x(args, x_operand);
  set_weight(args, weight_operand);
  args.rows = x.size(0);
  args.columns = weight.size(0);
  args.depth = x.size(1);
  args.experts = 1;
  args.dtype = args.out_dtype = dtype;
  args.out = out.mutable_data_ptr();
  args.out_stride = out.size(1);
  args.scale = 1;
  matmul(args, x);
  return out;
}

Tensor activate(const ExpertLayer& layer, const GatedArgs& inputs, const Tensor& like) {
  Tensor out = layer.matrix(like.size(0), inputs.size);
  GatedArgs args = inputs;
  args.out = out.mutable_data_ptr();
  args.limit = layer.limit;
  args.alpha = layer.alpha;
  args.up_offset = layer.up_offset;
  args.form = layer.form;
  args.dtype = layer.dtype;
  if (like.is_cuda()) cuda::gated_activation(args, like.get_device_index());
  else cpu::parallel(cpu::gated_activation, args, args.gate_rows.count, args.size * kActivationCost);
  return out;
}

// What the shared expert makes of all tokens.
Tensor shared_rows(const ExpertLayer& layer) {
  const Tensor gate = product(layer.x, layer.shared->gate, layer.dtype);
  const Tensor up = product(layer.x, layer.shared->up, layer.dtype);
  GatedArgs args{};
  args.gate = gate.const_data_ptr();
  args.up = up.const_data_ptr();
  args.gate_rows = args.up_rows = rows_of("fused_experts", gate);
  args.size = gate.size(1);
  return product(activate(layer, args, gate), layer.shared->down, layer.dtype);
}

// The weighted sum of the rows of y that belong to each token.
MoeUnpermuteArgs sum_of(const ExpertLayer& layer, const Tensor& y, Tensor& out, const Tensor& weights,
                        const int32_t* slots_to_rows) {
  MoeUnpermuteArgs sum{};
  sum.y = y.const_data_ptr();
  sum.slots_to_rows = slots_to_rows;
  sum.weights = weights.const_data_ptr();
  sum.out = out.mutable_data_ptr();
  sum.row_stride = sum.hidden_size = layer.hidden();
  sum.topk = layer.topk();
  sum.rows = layer.tokens() * layer.topk();
  sum.tokens = layer.tokens();
  sum.dtype = layer.dtype;
  sum.weights_dtype = layer.weights_dtype;
  return sum;
}

// ---- on a CPU: two products over gathered rows, the activation inside the first ----

Tensor experts_on_cpu(const char* op, const ExpertLayer& layer) {
  const ExpertRows map = layer.topk_ids.scalar_type() == ScalarType::Int
                             ? sort_slots<int32_t>(op, layer.topk_ids, layer.first_expert, layer.experts())
                             : sort_slots<int64_t>(op, layer.topk_ids, layer.first_expert, layer.experts());
  const int64_t rows = int64_t(map.tokens.size());
  Tensor out = layer.matrix(layer.tokens(), layer.hidden());
  Tensor activated = layer.matrix(rows, layer.intermediate()), y = layer.matrix(rows, layer.hidden());
  const std::vector<RowBlock> groups = map.groups();

  GroupedGemmArgs first{};
  first.dtype = first.out_dtype = layer.dtype;
  first.scale = 1;
  first.round_sums = first.gated = true;
  first.x = layer.x.const_data_ptr();
  first.x_stride = layer.x.stride(0);
  first.x_rows = map.tokens.data();
  set_weight(first, layer.gate_up);
  set_bias(first, layer.gate_up_bias);
  first.out = activated.mutable_data_ptr();
  first.columns = first.out_stride = layer.intermediate();
  first.depth = layer.hidden();
  first.form = layer.form;
  first.interleaved = layer.interleaved;
  first.limit = layer.limit;
  first.alpha = layer.alpha;
  first.up_offset = layer.up_offset;
  grouped_gemm_on_cpu(first, layer.x, groups);

  GroupedGemmArgs second{};
  second.dtype = second.out_dtype = layer.dtype;
  second.scale = 1;
  second.round_sums = true;
  second.x = first.out;
  second.x_stride = layer.intermediate();
  set_weight(second, layer.down);
  set_bias(second, layer.down_bias);
  second.out = y.mutable_data_ptr();
  second.columns = second.out_stride = layer.hidden();
  second.depth = layer.intermediate();
  grouped_gemm_on_cpu(second, layer.x, groups);

  const Tensor weights = dense(layer.topk_weights);
  MoeUnpermuteArgs sum = sum_of(layer, y, out, weights, map.slots_to_rows.data());
  std::optional<Tensor> shared;
  if (layer.shared) {
    shared = shared_rows(layer);
    sum.addend = shared->const_data_ptr();
  }
  cpu::parallel(cpu::moe_unpermute, sum, layer.tokens(), layer.hidden() * (layer.topk() + 1) * element_size(sum.dtype));
  return out;
}

// ---- on a GPU: the chain of the separate ops, without a wait for the device ----

struct DeviceMap {
  Tensor rows_to_slots, slots_to_rows, ends;  // ends by expert
  int32_t* counts;  // by expert, behind the ends
  int32_t* zeros;   // two, behind the counts of the experts and that of the shared one
};

DeviceMap map_on_cuda(const ExpertLayer& layer, const Tensor& ids) {
  ExpertMapArgs args{};
  args.ids = ids.const_data_ptr();
  args.wide_ids = ids.scalar_type() == ScalarType::Long;
  args.slots = args.rows = layer.tokens() * layer.topk();
  args.num_experts = std::numeric_limits<int64_t>::max();  // those of other ranks are not counted here
  args.first_expert = layer.first_expert;
  args.num_local_experts = layer.experts();
  args.alignment = 1;
  const int64_t experts = layer.experts();
  DeviceMap map{new_tensor(ids, {args.rows}, ScalarType::Int), new_tensor(ids, {args.slots}, ScalarType::Int),
                new_tensor(ids, {2 * experts + 4}, ScalarType::Int), nullptr, nullptr};
  args.rows_to_slots = static_cast<int32_t*>(map.rows_to_slots.mutable_data_ptr());
  args.slots_to_rows = static_cast<int32_t*>(map.slots_to_rows.mutable_data_ptr());
  args.offsets = static_cast<int32_t*>(map.ends.mutable_data_ptr());
  map.counts = args.counts = args.offsets + experts + 1;
  args.tail = args.counts + experts;
  args.tail_value = int32_t(layer.tokens());
  map.zeros = args.tail + 1;
  expert_map_on_cuda(args, ids);
  return map;
}

// Rows of x by expert; rows past those of the last expert hold anything.
Tensor permute_on_cuda(const ExpertLayer& layer, const DeviceMap& map) {
  Tensor out = layer.matrix(layer.tokens() * layer.topk(), layer.hidden());
  const int64_t size = element_size(layer.dtype);
  MoePermuteArgs args{};
  args.x = static_cast<const char*>(layer.x.const_data_ptr());
  args.out = static_cast<char*>(out.mutable_data_ptr());
  args.rows_to_slots = static_cast<const int32_t*>(map.rows_to_slots.const_data_ptr());
  args.slots_to_rows = static_cast<const int32_t*>(map.slots_to_rows.const_data_ptr());
  args.row_bytes = layer.hidden() * size;
  args.row_stride = layer.x.stride(0) * size;
  args.topk = layer.topk();
  args.rows = layer.tokens() * layer.topk();
  args.tokens = layer.tokens();
  cuda::moe_permute(args, layer.x.get_device_index());
  return out;
}

// Whether the second product starts before the first one ends. With few rows, where reading the weights is the bound,
// nothing is gained, and reports of what is written would hold up who multiply. The counts must fit in 32 bits.
bool can_chain(const ExpertLayer& layer) {
  const int64_t rows = layer.tokens() * layer.topk();
  return rows > 64 * layer.experts() && rows * (layer.intermediate() + 1) <= std::numeric_limits<int32_t>::max();
}

// How the products on a GPU go together.
struct ProductPlan {
  GateUp gate_up;  // the activation is a part of the first one
  bool chained;    // the second one reads what the first one has finished
  bool folded;     // the shared expert is one of the experts
};

// x may be one row for all experts.
Tensor product_on_cuda(const ExpertLayer& layer, DeviceMap& map, const Tensor& x, const Tensor& weight,
                       const std::optional<Tensor>& bias, const ProductPlan& plan, bool first) {
  const int64_t rows = layer.tokens() * layer.topk(), shared_rows = plan.folded ? layer.tokens() : 0;
  const GateUp gate_up = first ? plan.gate_up : GateUp::none;
  Tensor out = layer.matrix(rows + shared_rows, gate_up == GateUp::none ? weight.size(1) : layer.intermediate());
  const Tensor x_operand = as_tokens(x), weight_operand = as_operand(weight);
  MatmulArgs args{};
  set_x(args, x_operand);
  set_weight(args, weight_operand);
  if (x.size(0) == 1) args.x_stride = 0;
  args.dtype = args.out_dtype = layer.dtype;
  args.rows = rows;
  args.depth = x.size(1);
  args.columns = weight.size(1);
  args.out_stride = out.size(1);
  args.experts = layer.experts();
  if (plan.folded) {
    const SharedExpert& shared = *layer.shared;
    args.shared_rows = shared_rows;
    args.shared_weight = (first ? shared.gate : shared.down).const_data_ptr();
    args.shared_up = first ? shared.up.const_data_ptr() : nullptr;
    args.shared_column_stride = (first ? shared.gate : shared.down).stride(0);
    args.shared_x = first ? layer.x.const_data_ptr() : nullptr;
    args.shared_x_stride = layer.x.stride(0);
  }
  args.handed_out = map.zeros + (first ? 0 : 1);
  args.finished = plan.chained && first ? map.counts : nullptr;
  args.awaited = plan.chained && !first ? map.counts : nullptr;
  args.gate_up = gate_up;
  args.form = layer.form;
  args.limit = layer.limit;
  args.alpha = layer.alpha;
  args.up_offset = layer.up_offset;
  args.groups = static_cast<const int32_t*>(map.ends.const_data_ptr()) + 1;
  args.row_groups = RowGroups::ends;
  args.settled = !first || layer.tokens() > 1;
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.bias_stride = bias ? bias->stride(0) : 0;
  args.bias_step = BiasStep::rounded;
  args.scale = 1;
  args.out = out.mutable_data_ptr();
  matmul(args, x);
  return out;
}

// Whether the product can pair gates with ups: as they lie in the weight, 8 rows at a time, or as neighbours.
bool can_gate(const ExpertLayer& layer, const Tensor& weight) {
  const bool dense_k = layer.hidden() == 1 || weight.stride(2) == 1;
  return cuda::uses_copy_engine(layer.x.get_device_index()) && layer.dtype != DType::f32 && layer.hidden() > 0 &&
         (dense_k ? layer.intermediate() % 8 == 0 : layer.interleaved);
}

// Of the products of the experts, if it is none of theirs.
Tensor activate_on_cuda(const ExpertLayer& layer, const Tensor& hidden) {
  GatedArgs args{};
  args.gate = hidden.const_data_ptr();
  args.up = static_cast<const char*>(args.gate) + layer.intermediate() * element_size(layer.dtype);
  args.gate_rows = args.up_rows = rows_of("fused_experts", hidden);
  args.size = layer.intermediate();
  args.interleaved = layer.interleaved;
  return activate(layer, args, hidden);
}

// Whether the copy engine can bring the weights of the shared expert as those of the others.
bool can_fold(const ExpertLayer& layer, const Tensor& weight, GateUp gate_up) {
  if (!layer.shared || gate_up != GateUp::halves || layer.gate_up_bias || layer.down_bias) return false;
  const SharedExpert& shared = *layer.shared;
  const auto suits = [](const Tensor& t) {
    const bool dense = t.size(1) == 1 || t.stride(1) == 1;
    return dense && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(0) * 2 % 16 == 0 &&
           t.stride(0) >= t.size(1);
  };
  return shared.gate.size(0) == layer.intermediate() && shared.gate.stride(0) == shared.up.stride(0) &&
         suits(layer.x) && suits(shared.gate) && suits(shared.up) && suits(shared.down) &&
         (layer.hidden() == 1 || weight.stride(2) == 1) &&
         layer.tokens() * (layer.topk() + 1) <= std::numeric_limits<int32_t>::max();
}

Tensor experts_on_cuda(const ExpertLayer& layer) {
  const Tensor ids = dense(layer.topk_ids), weights = dense(layer.topk_weights);
  DeviceMap map = map_on_cuda(layer, ids);
  const Tensor x = layer.tokens() == 1 ? layer.x : permute_on_cuda(layer, map);
  const Tensor gate_up_weight = as_operand(layer.gate_up);
  const bool gated = can_gate(layer, gate_up_weight);
  const GateUp gate_up = !gated ? GateUp::none : layer.interleaved ? GateUp::alternating : GateUp::halves;
  const ProductPlan plan{gate_up, gated && can_chain(layer), can_fold(layer, gate_up_weight, gate_up)};
  const Tensor hidden = product_on_cuda(layer, map, x, gate_up_weight, layer.gate_up_bias, plan, true);
  const Tensor y = product_on_cuda(layer, map, gated ? hidden : activate_on_cuda(layer, hidden), layer.down,
                                   layer.down_bias, plan, false);
  Tensor out = layer.matrix(layer.tokens(), layer.hidden());
  const auto* slots_to_rows = static_cast<const int32_t*>(map.slots_to_rows.const_data_ptr());
  MoeUnpermuteArgs sum = sum_of(layer, y, out, weights, slots_to_rows);
  std::optional<Tensor> shared;
  if (plan.folded) {
    sum.addend = static_cast<const char*>(y.const_data_ptr()) + sum.rows * sum.row_stride * element_size(layer.dtype);
  } else if (layer.shared) {
    shared = shared_rows(layer);
    sum.addend = shared->const_data_ptr();
  }
  cuda::moe_unpermute(sum, x.get_device_index());
  return out;
}

std::optional<SharedExpert> shared_expert(const char* op, const Tensor& x, const std::optional<Tensor>& gate,
                                          const std::optional<Tensor>& up, const std::optional<Tensor>& down) {
  if (!gate && !up && !down) return std::nullopt;
  DI_CHECK(gate && up && down, op, ": shared_gate, shared_up and shared_down go together");
  DI_CHECK(gate->dim() == 2 && gate->size(1) == x.size(1), op, ": shared_gate must have shape [S, ", x.size(1),
           "], got ", shape_of(*gate));
  DI_CHECK(same_shape(*up, *gate), op, ": shared_up must have the shape of shared_gate, ", shape_of(*gate), ", got ",
           shape_of(*up));
  DI_CHECK(down->dim() == 2 && down->size(0) == x.size(1) && down->size(1) == gate->size(0), op,
           ": shared_down must have shape [", x.size(1), ", ", gate->size(0), "], got ", shape_of(*down));
  check_like_x(op, "shared_gate", *gate, x);
  check_like_x(op, "shared_up", *up, x);
  check_like_x(op, "shared_down", *down, x);
  return SharedExpert{*gate, *up, *down};
}

Tensor fused_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& topk_ids,
                     const Tensor& topk_weights, const std::optional<Tensor>& gate_up_bias,
                     const std::optional<Tensor>& down_bias, const std::string& activation, bool interleaved,
                     std::optional<double> limit, double alpha, double up_offset, int64_t first_expert,
                     const std::optional<Tensor>& shared_gate, const std::optional<Tensor>& shared_up,
                     const std::optional<Tensor>& shared_down) {
  const char* op = "fused_experts";
  DI_CHECK(x.dim() == 2, op, ": x must have shape [T, H], got ", shape_of(x));
  const DType dtype = float_dtype(op, "x", x);
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
  const Gated form = form_of(op, activation, alpha, up_offset);
  DI_CHECK(activation == "silu" || (!limit && alpha == 1 && up_offset == 0), op,
           ": limit, alpha and up_offset need activation silu, got ", activation);
  DI_CHECK(!limit || *limit > 0, op, ": limit must be positive, got ", *limit);
  DI_CHECK(first_expert >= 0, op, ": first_expert must not be negative, got ", first_expert);
  DI_CHECK(tokens * topk_ids.size(1) <= std::numeric_limits<int32_t>::max(), op,
           ": more than 2^31 - 1 (token, expert) pairs");
  DI_CHECK(!x.is_cuda() || experts <= cuda::kMostExperts, op, ": at most ", cuda::kMostExperts,
           " experts on a GPU, got ", experts);

  const auto shared = shared_expert(op, x, shared_gate, shared_up, shared_down);

  const ExpertLayer layer{deepinfer::with_dense_rows(x),
                          gate_up,
                          down,
                          topk_ids,
                          topk_weights,
                          with_dense_rows(gate_up_bias),
                          with_dense_rows(down_bias),
                          shared,
                          form,
                          interleaved,
                          float(limit.value_or(std::numeric_limits<double>::infinity())),
                          float(alpha),
                          float(up_offset),
                          first_expert,
                          dtype,
                          weights_dtype};
  if (!x.is_cuda()) return experts_on_cpu(op, layer);
  if (tokens * topk_ids.size(1) * experts == 0)
    return shared && tokens > 0 ? shared_rows(layer) : torch::stable::new_zeros(x, {tokens, hidden});
  return experts_on_cuda(layer);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "fused_experts(Tensor x, Tensor gate_up, Tensor down, Tensor topk_ids, Tensor topk_weights, *, "
      "Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation=\"silu\", bool interleaved=False, "
      "float? limit=None, float alpha=1.0, float up_offset=0.0, int first_expert=0, "
      "Tensor? shared_gate=None, Tensor? shared_up=None, Tensor? shared_down=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts)); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts)); }

}  // namespace deepinfer
