// The rope family: schemas, argument checks, outputs. Only the launch depends on the device.

#include "rope_op.h"

#include "../cpu/parallel.h"
#include "../cpu/rope.h"
#include "../cuda/rope.h"
#include "../npu/rope.h"
#include "check.h"
#include "indices.h"
#include "overlap.h"

namespace deepinfer {

Angles angles_of(const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions) {
  const auto usable = [](const Tensor& table) { return is_npu(table) ? with_dense_rows(table) : table; };
  return {usable(cos), usable(sin), positions};
}

namespace {

constexpr int64_t kMostHeadSize = 1 << 20;  // column numbers are ints on a device

RopeStyle rope_style(const char* op, const std::string& name) {
  if (name == "half") return RopeStyle::half;
  if (name == "interleaved") return RopeStyle::interleaved;
  if (name == "interleaved_to_half") return RopeStyle::interleaved_to_half;
  fail(op, ": style must be half, interleaved or interleaved_to_half, got ", name);
}

// Checks q and fills the part of `args` that it decides.
void prepare_q(const char* op, RopeArgs& args, const Tensor& q, const std::string& style, bool inverse) {
  args.style = rope_style(op, style);
  args.sin_sign = inverse ? -1.f : 1.f;
  DI_CHECK(q.dim() >= 1, op, ": q must have at least one dimension");
  args.dtype = float_dtype(op, "q", q);
  args.head_size = q.size(q.dim() - 1);
  DI_CHECK(args.head_size <= kMostHeadSize, op, ": the last dimension of q must not exceed ", kMostHeadSize, ", got ",
           args.head_size);
}

// Checks the tables for `rotary_dim` elements of q and fills the part of `args` that they decide.
void prepare_angles(const char* op, RopeArgs& args, const Tensor& q, const Angles& angles) {
  const auto& [cos, sin, positions] = angles;
  args.table_dtype = float_dtype(op, "cos", cos);
  DI_CHECK(sin.scalar_type() == cos.scalar_type(), op, ": sin must have the dtype of cos, ",
           name_of(cos.scalar_type()), ", got ", name_of(sin.scalar_type()));
  DI_CHECK(same_shape(sin, cos), op, ": sin must have the shape of cos, ", shape_of(cos), ", got ", shape_of(sin));
  check_same_device(op, "cos", cos, q);
  check_same_device(op, "sin", sin, q);
  args.columns = cos.dim() ? cos.size(cos.dim() - 1) : 0;
  DI_CHECK(args.columns == args.rotary_dim || args.columns * 2 == args.rotary_dim, op,
           ": the last dimension of cos must be rotary_dim or half of it, ", args.rotary_dim, " or ",
           args.rotary_dim / 2, ", got ", shape_of(cos));
  args.round_products = args.dtype != DType::f32 && args.table_dtype == args.dtype;
  if (positions) {
    DI_CHECK(cos.dim() == 2, op, ": with positions, cos must be a cache [rows, columns], got ", shape_of(cos));
    const auto dtype = positions->scalar_type();
    DI_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": positions must be int32 or int64, got ",
             name_of(dtype));
    check_same_device(op, "positions", *positions, q);
    args.positions = positions->const_data_ptr();
    args.wide_positions = dtype == ScalarType::Long;
    args.cache_rows = cos.size(0);
  }
}

}  // namespace

void prepare(const char* op, RopeArgs& args, const Tensor& q, const std::optional<Tensor>& k, const Angles& angles,
             const std::string& style, bool inverse, std::optional<int64_t> rotary_dim) {
  prepare_q(op, args, q, style, inverse);
  args.rotary_dim = rotary_dim.value_or(args.head_size);
  DI_CHECK(args.rotary_dim >= 2 && args.rotary_dim <= args.head_size && args.rotary_dim % 2 == 0, op,
           ": rotary_dim must be even and in [2, ", args.head_size, "], got ", args.rotary_dim);
  if (k) {
    DI_CHECK(k->dim() >= 1 && k->size(k->dim() - 1) == args.head_size, op, ": k must have the last dimension of q, ",
             args.head_size, ", got ", shape_of(*k));
    DI_CHECK(k->scalar_type() == q.scalar_type(), op, ": k must have the dtype of q, ", name_of(q.scalar_type()),
             ", got ", name_of(k->scalar_type()));
    check_same_device(op, "k", *k, q);
  }
  prepare_angles(op, args, q, angles);
}

namespace {

// Strides of `t`, without its last `inner` dimensions, as it broadcasts to the leading dimensions of x.
std::vector<int64_t> broadcast_strides(const char* op, const char* name, const Tensor& t, int inner,
                                       const char* x_name, const Tensor& x) {
  const int64_t dims = x.dim() - 1, given = t.dim() - inner;
  std::vector<int64_t> strides(dims, 0);
  bool fits = given <= dims;
  for (int64_t d = 0; fits && d < given; ++d) {
    const int64_t at = dims - given + d;
    fits = t.size(d) == x.size(at) || t.size(d) == 1;
    if (t.size(d) != 1) strides[at] = t.stride(d);
  }
  DI_CHECK(fits, op, ": ", name, " of shape ", shape_of(t), " does not broadcast to the leading dimensions of ",
           x_name, ", ", shape_of(x));
  return strides;
}

const void* moved(const void* data, int64_t elements, DType dtype) {
  return data ? static_cast<const char*>(data) + elements * (dtype == DType::f32 ? 4 : 2) : nullptr;
}

// The rows of `t`, from the element `first` on.
Place place_of(const Tensor& t, int64_t first, DType dtype) {
  Place place{moved(t.const_data_ptr(), first, dtype), {}};
  for (int64_t d = 0; d + 1 < t.dim(); ++d) place.strides.push_back(t.stride(d));
  return place;
}

// The walk over rows with the leading dimensions of x, which `turned` and `rest` have the elements of: dimensions along
// which the tables and slots stay the same go inside, as the rows of a group.
RopeTensor walk(const char* op, RopeArgs& args, const char* name, const Tensor& x, const Place& turned,
                const Place& rest, const Target& out, const Angles& angles) {
  RopeTensor walked{};
  walked.rest_size = out.width - args.rotary_dim;
  const auto out_at = [&](int64_t element) {
    return const_cast<void*>(moved(out.place.data, element, args.dtype));
  };
  walked.in = turned.data;
  walked.out = out_at(args.apart ? walked.rest_size : 0);
  walked.rest = rest.data;
  walked.rest_out = out_at(args.apart ? 0 : args.rotary_dim);
  const auto& [cos, sin, positions] = angles;
  const auto cos_strides = positions ? broadcast_strides(op, "positions", *positions, 0, name, x)
                                     : broadcast_strides(op, "cos", cos, 1, name, x);
  const auto sin_strides = positions ? cos_strides : broadcast_strides(op, "sin", sin, 1, name, x);
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    const bool same_slot = out.slots.empty() || out.slots[d] == 0;
    const bool inside = cos_strides[d] == 0 && sin_strides[d] == 0 && same_slot;
    append(op, inside ? walked.in_rows : walked.in_groups, x.size(d), turned.strides[d]);
    append(op, inside ? walked.rest_rows : walked.rest_groups, x.size(d), rest.strides[d]);
    append(op, inside ? walked.out_rows : walked.out_groups, x.size(d), out.place.strides[d]);
    if (inside) continue;
    if (!out.slots.empty()) append(op, args.cache.slot_groups, x.size(d), out.slots[d]);
    append(op, positions ? walked.position_groups : walked.cos.groups, x.size(d), cos_strides[d]);
    if (!positions) append(op, walked.sin.groups, x.size(d), sin_strides[d]);
  }
  auto table = [&](RopeTable& to, const Tensor& from) {
    to.data = from.const_data_ptr();
    to.row_stride = positions ? from.stride(0) : 0;
    to.column_stride = from.stride(from.dim() - 1);
  };
  table(walked.cos, cos);
  table(walked.sin, sin);
  return walked;
}

}  // namespace

Target target_of(const Tensor& out, DType dtype) { return {place_of(out, 0, dtype), out.size(out.dim() - 1), {}}; }

RopeTensor walk(const char* op, RopeArgs& args, const char* name, const Tensor& x, const Target& out,
                const Angles& angles) {
  const Place turned = place_of(x, 0, args.dtype), rest = place_of(x, args.rotary_dim, args.dtype);
  return walk(op, args, name, x, turned, rest, out, angles);
}

void launch_rope(const char* op, RopeArgs& args, const Tensor& q, const Angles& angles) {
  for (int i = 0; i < 2; ++i) {
    const RopeTensor& x = args.tensors[i];
    args.rows[i] = x.in ? x.in_groups.count * x.in_rows.count : 0;
  }
  const RopeCache& cache = args.cache;
  args.rows[2] = cache.slots ? cache.sizes[0] * cache.sizes[1] * cache.sizes[2] : 0;
  if (angles.positions) check_indices(op, "positions", *angles.positions, 0, args.cache_rows);
  if (q.is_cuda()) return cuda::rotary_embedding(args, q.get_device_index());
  if (is_npu(q)) {
    DI_CHECK(args.head_size <= npu::most_rope_size(), op, ": the last dimension of q must not exceed ",
             npu::most_rope_size(), " on an NPU, got ", args.head_size);
    return npu::rotary_embedding(args, q.get_device_index());
  }
  cpu::parallel(cpu::rotary_embedding, args, args.rows[0] + args.rows[1] + args.rows[2], args.head_size * 4);
}

bool is_one_kernel(const RopeArgs& args, const Tensor& q, ScalarType normed) {
  if (normed != q.scalar_type() || args.head_size > RopeNorm::kMostHeadSize) return false;
  return q.is_cpu() || is_npu(q) || (q.is_cuda() && cuda::norms_rows(args));
}

ScalarType prepare_norm(const char* op, RopeArgs& args, const Tensor& q, const std::optional<Tensor>& k,
                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
                        const std::string& form) {
  RopeNorm& norm = args.norm;
  norm.form = weight_form(op, form);
  norm.eps = float(eps);
  const ScalarType normed = check_norm(op, q, args.head_size, "q_weight", q_weight, eps, norm.form, form);
  if (k) {
    check_norm(op, *k, args.head_size, "k_weight", k_weight, eps, norm.form, form);
    if (q_weight)
      DI_CHECK(k_weight->scalar_type() == q_weight->scalar_type(), op, ": k_weight must have the dtype of q_weight, ",
               name_of(q_weight->scalar_type()), ", got ", name_of(k_weight->scalar_type()));
  } else {
    DI_CHECK(!k_weight, op, ": k_weight must be None without k");
  }
  return normed;
}

void check_destination(const char* op, const char* name, const Tensor& x, const Angles& angles) {
  DI_CHECK(!overlaps_itself(x), op, ": ", name,
           " is written and must not be expanded or have elements that share memory");
  DI_CHECK(!overlap(x, angles.cos) && !overlap(x, angles.sin), op, ": ", name,
           " is written and must not share memory with cos or sin");
  DI_CHECK(!angles.positions || !overlap(x, *angles.positions), op, ": ", name,
           " is written and must not share memory with positions");
}

namespace {

// q and k rotated into fresh tensors.
std::tuple<Tensor, Tensor> rotated(const char* op, RopeArgs& args, const Tensor& q, const std::optional<Tensor>& k,
                                   const Angles& angles) {
  Tensor dense_q = with_dense_rows(q), q_out = new_tensor(q, sizes_of(q), q.scalar_type());
  args.tensors[0] = walk(op, args, "q", dense_q, target_of(q_out, args.dtype), angles);
  std::optional<Tensor> dense_k;
  Tensor k_out = new_tensor(q, k ? sizes_of(*k) : std::vector<int64_t>{0}, q.scalar_type());
  if (k)
    args.tensors[1] = walk(op, args, "k", dense_k.emplace(with_dense_rows(*k)), target_of(k_out, args.dtype), angles);
  launch_rope(op, args, q, angles);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                            const Tensor& sin, const std::optional<Tensor>& positions,
                                            const std::string& style, bool inverse,
                                            std::optional<int64_t> rotary_dim) {
  const char* op = "rotary_embedding";
  RopeArgs args{};
  const Angles angles = angles_of(cos, sin, positions);
  prepare(op, args, q, k, angles, style, inverse, rotary_dim);
  return rotated(op, args, q, k, angles);
}

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const std::optional<Tensor>& k,
                                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                                        const Tensor& cos, const Tensor& sin, double eps,
                                        const std::optional<Tensor>& positions, const std::string& style, bool inverse,
                                        std::optional<int64_t> rotary_dim, const std::string& form) {
  const char* op = "qk_norm_rope";
  RopeArgs args{};
  const Angles angles = angles_of(cos, sin, positions);
  prepare(op, args, q, k, angles, style, inverse, rotary_dim);
  const ScalarType normed = prepare_norm(op, args, q, k, q_weight, k_weight, eps, form);
  if (!is_one_kernel(args, q, normed)) {
    const Tensor normed_q = rms_norm(q, q_weight, eps, form);
    std::optional<Tensor> normed_k;
    if (k) normed_k = rms_norm(*k, k_weight, eps, form);
    return rotary_embedding(normed_q, normed_k, cos, sin, positions, style, inverse, rotary_dim);
  }
  const DenseWeights weights(op, args, q_weight, k_weight);
  return rotated(op, args, q, k, angles);
}

// The last columns of q and all of k_rope are turned; q keeps those in front of them, and k has k_nope there.
std::tuple<Tensor, Tensor> mla_qk_rope(const Tensor& q, const std::optional<Tensor>& k_nope, const Tensor& k_rope,
                                       const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions,
                                       const std::string& style, bool inverse) {
  const char* op = "mla_qk_rope";
  RopeArgs args{};
  args.apart = true;
  const Angles angles = angles_of(cos, sin, positions);
  prepare_q(op, args, q, style, inverse);
  DI_CHECK(k_rope.dim() >= 1, op, ": k_rope must have at least one dimension");
  args.rotary_dim = k_rope.size(k_rope.dim() - 1);
  DI_CHECK(args.rotary_dim >= 2 && args.rotary_dim <= args.head_size && args.rotary_dim % 2 == 0, op,
           ": the last dimension of k_rope must be even and in [2, ", args.head_size, "], got ", shape_of(k_rope));
  const int64_t nope = args.head_size - args.rotary_dim;
  if (k_nope)
    DI_CHECK(k_nope->dim() >= 1 && k_nope->size(k_nope->dim() - 1) == nope, op,
             ": the last dimension of k_nope must be that of q less that of k_rope, ", nope, ", got ",
             shape_of(*k_nope));
  const auto check_like_q = [&](const char* name, const Tensor& t) {
    DI_CHECK(t.scalar_type() == q.scalar_type(), op, ": ", name, " must have the dtype of q, ",
             name_of(q.scalar_type()), ", got ", name_of(t.scalar_type()));
    check_same_device(op, name, t, q);
  };
  if (k_nope) check_like_q("k_nope", *k_nope);
  check_like_q("k_rope", k_rope);
  prepare_angles(op, args, q, angles);

  const Tensor dense_q = with_dense_rows(q), dense_rope = with_dense_rows(k_rope);
  const Tensor dense_nope = k_nope ? with_dense_rows(*k_nope) : dense_rope;
  std::vector<int64_t> k_sizes = sizes_of(dense_nope);
  if (k_nope) k_sizes.back() = args.head_size;
  Tensor q_out = new_tensor(q, sizes_of(q), q.scalar_type()), k_out = new_tensor(q, k_sizes, q.scalar_type());
  args.tensors[0] = walk(op, args, "q", dense_q, place_of(dense_q, nope, args.dtype),
                         place_of(dense_q, 0, args.dtype), target_of(q_out, args.dtype), angles);
  const Place turned{dense_rope.const_data_ptr(), broadcast_strides(op, "k_rope", dense_rope, 1, "k_nope", dense_nope)};
  args.tensors[1] = walk(op, args, k_nope ? "k_nope" : "k_rope", dense_nope, turned,
                         place_of(dense_nope, 0, args.dtype), target_of(k_out, args.dtype), angles);
  launch_rope(op, args, q, angles);
  return {q_out, k_out};
}

// Stand-in for a tensor whose rows can not be rotated where they lie: rows that are not dense, and interleaved_to_half,
// whose outputs land on inputs that are still to be read, unless the threads of a row wait for each other.
std::optional<Tensor> staging(const RopeArgs& args, const Tensor& x) {
  const bool dense = x.stride(x.dim() - 1) == 1;
  const bool in_order = args.style != RopeStyle::interleaved_to_half || (x.is_cuda() && cuda::reads_whole_rows(args));
  if (dense && in_order) return std::nullopt;
  return new_tensor(x, sizes_of(x), x.scalar_type());
}

void rotary_embedding_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin,
                       const std::optional<Tensor>& positions, const std::string& style, bool inverse,
                       std::optional<int64_t> rotary_dim) {
  const char* op = "rotary_embedding_";
  RopeArgs args{};
  const Angles angles = angles_of(cos, sin, positions);
  prepare(op, args, q, k, angles, style, inverse, rotary_dim);
  check_destination(op, "q", q, angles);
  if (k) {
    check_destination(op, "k", *k, angles);
    DI_CHECK(!overlap(q, *k), op, ": q and k are written and must not share memory");
  }
  Tensor dense_q = with_dense_rows(q);
  const auto staged_q = staging(args, q);
  args.tensors[0] = walk(op, args, "q", dense_q, target_of(staged_q.value_or(q), args.dtype), angles);
  std::optional<Tensor> dense_k, staged_k;
  if (k) {
    staged_k = staging(args, *k);
    const Target out = target_of(staged_k.value_or(*k), args.dtype);
    args.tensors[1] = walk(op, args, "k", dense_k.emplace(with_dense_rows(*k)), out, angles);
  }
  launch_rope(op, args, q, angles);
  if (staged_q) torch::stable::copy_(q, *staged_q);
  if (staged_k) torch::stable::copy_(*k, *staged_k);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "rotary_embedding(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions=None, str style=\"half\","
      " bool inverse=False, int? rotary_dim=None) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions=None,"
      " str style=\"half\", bool inverse=False, int? rotary_dim=None) -> ()");
  m.def(
      "qk_norm_rope(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, *,"
      " Tensor? positions=None, str style=\"half\", bool inverse=False, int? rotary_dim=None,"
      " str weight_form=\"cast_mul\") -> (Tensor, Tensor)");
  m.def(
      "mla_qk_rope(Tensor q, Tensor? k_nope, Tensor k_rope, Tensor cos, Tensor sin, Tensor? positions=None,"
      " str style=\"half\", bool inverse=False) -> (Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  m.impl("rotary_embedding_", TORCH_BOX(&rotary_embedding_));
  m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  implement(m);
  m.impl("mla_qk_rope", TORCH_BOX(&mla_qk_rope));
}
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) {
  implement(m);
  m.impl("mla_qk_rope", TORCH_BOX(&mla_qk_rope));
}
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
