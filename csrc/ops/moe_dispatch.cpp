// moe_expert_map, and moe_permute and moe_unpermute with and without scales: schemas, argument checks, outputs.

#include "moe_dispatch.h"

#include <limits>

#include "../cpu/moe_dispatch.h"
#include "../cpu/pages.h"
#include "../cpu/parallel.h"
#include "../cuda/moe_dispatch.h"
#include "../npu/moe_dispatch.h"
#include "../npu/quant.h"
#include "expert_map.h"
#include "indices.h"
#include "quant_format.h"
#include "rows.h"

namespace deepinfer {

void expert_map_on_cuda(ExpertMapArgs& args, const Tensor& ids) {
  const int device = ids.get_device_index();
  const cuda::ExpertMapPlan plan = cuda::plan_expert_map(args.slots, args.num_local_experts, device);
  args.chunks = plan.chunks;
  std::optional<Tensor> counts;
  if (plan.counted) {
    counts = new_tensor(ids, {args.chunks, args.num_local_experts}, ScalarType::Int);
    args.cursors = static_cast<int32_t*>(counts->mutable_data_ptr());
  }
  cuda::expert_map(args, device);
}

namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kSlotsPerThread = 8192;  // sorting fewer is quicker than waking a thread

void check_matrix(const char* op, const char* argument, const Tensor& t, const char* dims) {
  DI_CHECK(t.dim() == 2, op, ": ", argument, " must be 2-D, [", dims, "], got shape ", shape_of(t));
}

void check_map(const char* op, const char* argument, const Tensor& map, const Tensor& x) {
  DI_CHECK(map.scalar_type() == ScalarType::Int, op, ": ", argument, " must be int32, got ",
           name_of(map.scalar_type()));
  check_same_device(op, argument, map, x);
}

// Throws before anything is written when an id is out of range.
void sort_on_cpu(ExpertMapArgs& args) {
  const int64_t threads = torch::stable::get_num_threads();
  args.chunks = std::max<int64_t>(1, std::min(threads, args.slots / kSlotsPerThread));
  std::vector<int32_t> cursors(args.chunks * args.num_local_experts);
  std::vector<int64_t> invalid(args.chunks);
  args.cursors = cursors.data();
  args.invalid = invalid.data();
  cpu::parallel(cpu::expert_count, args, args.chunks, kSlotsPerThread * 8);
  for (int64_t slot : invalid)
    if (slot >= 0)
      fail("moe_expert_map: topk_ids must lie in [-1, ", args.num_experts, "), got ",
           args.wide_ids ? static_cast<const int64_t*>(args.ids)[slot] : static_cast<const int32_t*>(args.ids)[slot]);
  cpu::expert_layout(args, 0, 1);
  cpu::parallel(cpu::expert_place, args, args.chunks, kSlotsPerThread * 8);
}

void sort_on_cuda(ExpertMapArgs& args, const Tensor& ids) {
  check_indices("moe_expert_map", "topk_ids", ids, -1, args.num_experts);
  const int64_t most = cuda::most_local_experts(ids.get_device_index());
  DI_CHECK(args.num_local_experts <= most, "moe_expert_map: at most ", most, " local experts on this GPU, got ",
           args.num_local_experts);
  expert_map_on_cuda(args, ids);
}

void sort_on_npu(ExpertMapArgs& args, const Tensor& ids) {
  check_indices("moe_expert_map", "topk_ids", ids, -1, args.num_experts);
  const int64_t most = npu::most_local_experts();
  DI_CHECK(args.num_local_experts <= most, "moe_expert_map: at most ", most, " local experts on this NPU, got ",
           args.num_local_experts);
  const int device = ids.get_device_index();
  Tensor counts = new_tensor(ids, {npu::cores(device), args.num_local_experts}, ScalarType::Int);
  npu::expert_map(args, static_cast<int32_t*>(counts.mutable_data_ptr()), device);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_expert_map(const Tensor& topk_ids, int64_t num_experts,
                                                          int64_t alignment, int64_t first_expert,
                                                          std::optional<int64_t> num_local_experts) {
  const char* op = "moe_expert_map";
  check_matrix(op, "topk_ids", topk_ids, "tokens, topk");
  const ScalarType id_type = topk_ids.scalar_type();
  DI_CHECK(id_type == ScalarType::Long || id_type == ScalarType::Int, op, ": topk_ids must be int64 or int32, got ",
           name_of(id_type));
  DI_CHECK(num_experts >= 1 && num_experts <= kMaxRows, op, ": num_experts must lie in [1, ", kMaxRows, "], got ",
           num_experts);
  DI_CHECK(alignment >= 1 && alignment <= kMaxRows, op, ": alignment must lie in [1, ", kMaxRows, "], got ",
           alignment);
  DI_CHECK(first_expert >= 0 && first_expert < num_experts, op, ": first_expert must lie in [0, ", num_experts,
           "), got ", first_expert);
  const int64_t local = num_local_experts.value_or(num_experts - first_expert);
  DI_CHECK(local >= 1 && local <= num_experts - first_expert, op, ": num_local_experts must lie in [1, ",
           num_experts - first_expert, "], got ", local);

  ExpertMapArgs args{};
  args.slots = topk_ids.size(0) * topk_ids.size(1);
  DI_CHECK(args.slots <= kMaxRows - local * (alignment - 1), op, ": ", args.slots,
           " slots with alignment ", alignment, " exceed the ", kMaxRows, " rows of an int32 map");
  args.rows = (args.slots + local * (alignment - 1)) / alignment * alignment;
  args.num_experts = num_experts;
  args.first_expert = first_expert;
  args.num_local_experts = local;
  args.alignment = alignment;
  args.wide_ids = id_type == ScalarType::Long;
  Tensor ids = torch::stable::contiguous(topk_ids);
  args.ids = ids.const_data_ptr();

  Tensor rows_to_slots = new_tensor(topk_ids, {args.rows}, ScalarType::Int);
  Tensor slots_to_rows = new_tensor(topk_ids, sizes_of(topk_ids), ScalarType::Int);
  Tensor offsets = new_tensor(topk_ids, {local + 1}, ScalarType::Int);
  Tensor counts = new_tensor(topk_ids, {local}, ScalarType::Int);
  args.rows_to_slots = static_cast<int32_t*>(rows_to_slots.mutable_data_ptr());
  args.slots_to_rows = static_cast<int32_t*>(slots_to_rows.mutable_data_ptr());
  args.offsets = static_cast<int32_t*>(offsets.mutable_data_ptr());
  args.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  if (topk_ids.is_cuda()) {
    sort_on_cuda(args, topk_ids);
  } else if (is_npu(topk_ids)) {
    sort_on_npu(args, topk_ids);
  } else {
    sort_on_cpu(args);
  }
  return {rows_to_slots, slots_to_rows, offsets, counts};
}

Tensor permute(const char* op, const Tensor& x, const Tensor& rows_to_slots, int64_t topk,
               const std::optional<Tensor>& slots_to_rows) {
  check_matrix(op, "x", x, "tokens, hidden_size");
  DI_CHECK(rows_to_slots.dim() == 1, op, ": rows_to_slots must be 1-D, got shape ", shape_of(rows_to_slots));
  check_map(op, "rows_to_slots", rows_to_slots, x);
  DI_CHECK(topk >= 1 && topk <= kMaxRows, op, ": topk must lie in [1, ", kMaxRows, "], got ", topk);
  const int64_t hidden_size = x.size(1);
  Tensor map = torch::stable::contiguous(rows_to_slots);
  MoePermuteArgs args{};
  args.rows = rows_to_slots.size(0);
  args.tokens = x.size(0);
  args.rows_to_slots = static_cast<const int32_t*>(map.const_data_ptr());
  std::optional<Tensor> inverse;
  if (slots_to_rows) {
    DI_CHECK(slots_to_rows->dim() == 2 && slots_to_rows->size(0) == args.tokens && slots_to_rows->size(1) == topk, op,
             ": slots_to_rows must have shape [", args.tokens, ", ", topk, "], got ", shape_of(*slots_to_rows));
    check_map(op, "slots_to_rows", *slots_to_rows, x);
    inverse = torch::stable::contiguous(*slots_to_rows);
    args.slots_to_rows = static_cast<const int32_t*>(inverse->const_data_ptr());
  }
  check_indices(op, "rows_to_slots", map, -1, args.tokens * topk);

  Tensor out = new_tensor(x, {args.rows, hidden_size}, x.scalar_type());
  Tensor dense_x = with_dense_rows(x);
  const int64_t element = x.element_size();
  args.x = static_cast<const char*>(dense_x.const_data_ptr());
  args.out = static_cast<char*>(out.mutable_data_ptr());
  args.row_bytes = hidden_size * element;
  args.row_stride = dense_x.stride(0) * element;
  args.topk = topk;
  if (x.is_cuda()) {
    cuda::moe_permute(args, x.get_device_index());
  } else if (is_npu(x)) {
    npu::moe_permute(args, x.get_device_index());
  } else {
    cpu::prefer_huge_pages(args.out, args.rows * args.row_bytes);
    cpu::parallel(cpu::moe_permute, args, args.rows, args.row_bytes * 2);
  }
  return out;
}

Tensor moe_permute(const Tensor& x, const Tensor& rows_to_slots, int64_t topk,
                   const std::optional<Tensor>& slots_to_rows) {
  return permute("moe_permute", x, rows_to_slots, topk, slots_to_rows);
}

// The scales go as the tokens do, into either layout.
std::tuple<Tensor, Tensor> moe_permute_scaled(const Tensor& x, const Tensor& scales, const Tensor& rows_to_slots,
                                              int64_t topk, const std::optional<Tensor>& slots_to_rows,
                                              std::string scale_layout) {
  const char* op = "moe_permute_scaled";
  const QuantFormat format = quant_format(op, std::nullopt, false, scales.scalar_type(), scale_layout);
  check_matrix(op, "x", x, "tokens, hidden_size");
  check_matrix(op, "scales", scales, "tokens, groups");
  DI_CHECK(scales.size(0) == x.size(0), op, ": scales must have ", x.size(0), " rows, those of x, got ",
           scales.size(0));
  check_same_device(op, "scales", scales, x);
  Tensor out = permute(op, x, rows_to_slots, topk, slots_to_rows);
  const int64_t rows = rows_to_slots.size(0), columns = scales.size(1);
  Scales layout{};
  const int64_t groups = format.scale == ScaleType::packed ? 4 * columns : columns;
  Tensor out_scales = new_scales(op, x, {rows, columns}, rows, groups, format, layout);
  const Tensor map = torch::stable::contiguous(rows_to_slots);
  MoePermuteScalesArgs args{};
  args.scales = scales.const_data_ptr();
  args.out = layout.data;
  args.rows_to_slots = static_cast<const int32_t*>(map.const_data_ptr());
  args.row_stride = scales.stride(0);
  args.column_stride = scales.stride(1);
  args.out_row_stride = layout.row;
  args.out_column_stride = layout.column;
  args.columns = columns;
  args.topk = topk;
  args.rows = rows;
  args.tokens = x.size(0);
  args.bytes = int(scales.element_size());
  if (x.is_cuda()) {
    cuda::moe_permute_scales(args, x.get_device_index());
  } else if (is_npu(x)) {
    npu::moe_permute_scales(args, x.get_device_index());
  } else {
    cpu::parallel(cpu::moe_permute_scales, args, rows, columns * args.bytes * 2);
  }
  return {out, out_scales};
}

// The map and what the sum of rows needs to know of it.
void use_slots_to_rows(const char* op, MoeUnpermuteArgs& args, const Tensor& y, const Tensor& map) {
  args.rows = y.size(0);
  args.tokens = map.size(0);
  args.hidden_size = y.size(1);
  args.topk = map.size(1);
  args.slots_to_rows = static_cast<const int32_t*>(map.const_data_ptr());
  check_indices(op, "slots_to_rows", map, -1, args.rows);
}

void check_weights(const char* op, const Tensor& weights, const Tensor& slots_to_rows, const Tensor& y) {
  DI_CHECK(same_shape(weights, slots_to_rows), op, ": topk_weights must have the shape of slots_to_rows, ",
           shape_of(slots_to_rows), ", got ", shape_of(weights));
  check_same_device(op, "topk_weights", weights, y);
  float_dtype(op, "topk_weights", weights);
}

Tensor sum_rows(MoeUnpermuteArgs& args, const Tensor& y, ScalarType dtype) {
  Tensor out = new_tensor(y, {args.tokens, args.hidden_size}, dtype);
  Tensor dense_y = with_dense_rows(y);
  args.y = dense_y.const_data_ptr();
  args.row_stride = dense_y.stride(0);
  args.out = out.mutable_data_ptr();
  if (y.is_cuda()) {
    cuda::moe_unpermute(args, y.get_device_index());
  } else if (is_npu(y)) {
    DI_CHECK(args.topk <= npu::most_choices(), "moe_unpermute: at most ", npu::most_choices(),
             " choices a token on this NPU, got ", args.topk);
    npu::moe_unpermute(args, y.get_device_index());
  } else {
    cpu::parallel(cpu::moe_unpermute, args, args.tokens, args.hidden_size * (args.topk + 1) * 4);
  }
  return out;
}

Tensor moe_unpermute(const Tensor& y, const Tensor& slots_to_rows, const std::optional<Tensor>& topk_weights) {
  const char* op = "moe_unpermute";
  check_matrix(op, "y", y, "rows, hidden_size");
  MoeUnpermuteArgs args{};
  args.dtype = float_dtype(op, "y", y);
  check_matrix(op, "slots_to_rows", slots_to_rows, "tokens, topk");
  check_map(op, "slots_to_rows", slots_to_rows, y);
  std::optional<Tensor> weights;
  if (topk_weights) {
    check_weights(op, *topk_weights, slots_to_rows, y);
    args.weights_dtype = float_dtype(op, "topk_weights", *topk_weights);
    args.weights = weights.emplace(torch::stable::contiguous(*topk_weights)).const_data_ptr();
  }
  const Tensor map = torch::stable::contiguous(slots_to_rows);
  use_slots_to_rows(op, args, y, map);
  return sum_rows(args, y, y.scalar_type());
}

Tensor moe_unpermute_scaled(const Tensor& y, const Tensor& row_scales, const Tensor& slots_to_rows,
                            const std::optional<Tensor>& topk_weights, std::optional<ScalarType> dtype) {
  const char* op = "moe_unpermute_scaled";
  check_matrix(op, "y", y, "rows, hidden_size");
  DI_CHECK(y.scalar_type() == ScalarType::Float8_e4m3fn, op, ": y must be float8_e4m3fn, got ",
           name_of(y.scalar_type()));
  const bool column = row_scales.dim() == 2 && row_scales.size(1) == 1;
  DI_CHECK((row_scales.dim() == 1 || column) && row_scales.size(0) == y.size(0), op, ": row_scales must have shape [",
           y.size(0), "] or [", y.size(0), ", 1], got ", shape_of(row_scales));
  DI_CHECK(row_scales.scalar_type() == ScalarType::Float, op, ": row_scales must be float32, got ",
           name_of(row_scales.scalar_type()));
  check_same_device(op, "row_scales", row_scales, y);
  check_matrix(op, "slots_to_rows", slots_to_rows, "tokens, topk");
  check_map(op, "slots_to_rows", slots_to_rows, y);
  MoeUnpermuteArgs args{};
  args.coded = true;
  args.weights_dtype = DType::f32;
  std::optional<Tensor> weights;
  if (topk_weights) {
    check_weights(op, *topk_weights, slots_to_rows, y);
    weights = torch::stable::contiguous(torch::stable::to(*topk_weights, ScalarType::Float));
    args.weights = weights->const_data_ptr();
  }
  if (is_npu(y)) npu::check_codes(op, Code::e4m3, ScaleType::f32, y.get_device_index());
  const ScalarType result = dtype.value_or(ScalarType::BFloat16);
  args.dtype = float_dtype(op, "dtype", result);
  const Tensor map = torch::stable::contiguous(slots_to_rows), scales = torch::stable::contiguous(row_scales);
  args.row_scales = static_cast<const float*>(scales.const_data_ptr());
  use_slots_to_rows(op, args, y, map);
  return sum_rows(args, y, result);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "moe_expert_map(Tensor topk_ids, int num_experts, *, int alignment=1, int first_expert=0,"
      " int? num_local_experts=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("moe_permute(Tensor x, Tensor rows_to_slots, int topk, Tensor? slots_to_rows=None) -> Tensor");
  m.def(
      "moe_permute_scaled(Tensor x, Tensor scales, Tensor rows_to_slots, int topk, Tensor? slots_to_rows=None, *,"
      " str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "moe_unpermute_scaled(Tensor y, Tensor row_scales, Tensor slots_to_rows, Tensor? topk_weights=None, *,"
      " ScalarType? dtype=None) -> Tensor");
  m.def("moe_unpermute(Tensor y, Tensor slots_to_rows, Tensor? topk_weights=None) -> Tensor");
}

static void implement(auto& m) {
  m.impl("moe_expert_map", TORCH_BOX(&moe_expert_map));
  m.impl("moe_permute", TORCH_BOX(&moe_permute));
  m.impl("moe_permute_scaled", TORCH_BOX(&moe_permute_scaled));
  m.impl("moe_unpermute_scaled", TORCH_BOX(&moe_unpermute_scaled));
  m.impl("moe_unpermute", TORCH_BOX(&moe_unpermute));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
