// rotary_embedding_cache_ and qk_norm_rope_cache_: q is rotated, k rotated into a cache and v copied into another one.

#include <algorithm>

#include "indices.h"
#include "overlap.h"
#include "rope_op.h"
#include "rows.h"

namespace deepinfer {

namespace {

// What takes k and v, and where their tokens go.
struct Caches {
  Tensor v, keys, values, position;
};

// Checks the arguments that k and v are written by; `dtype` is that of q and k where they are rotated.
void check_caches(const char* op, const Tensor& q, const Tensor& k, const Caches& caches, ScalarType dtype,
                  const Angles& angles) {
  const auto& [v, keys, values, position] = caches;
  DI_CHECK(q.dim() == 4, op, ": q must be [batch, tokens, heads, head_size], got ", shape_of(q));
  const auto check_leading = [&](const char* name, const Tensor& t, int64_t heads, const char* wanted) {
    DI_CHECK(t.dim() == 4 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == heads, op, ": ", name,
             " must have ", wanted, ", got ", shape_of(t));
  };
  check_leading("k", k, k.dim() == 4 ? k.size(2) : 0, "the batch and the tokens of q");
  check_leading("v", v, k.size(2), "the batch, the tokens and the heads of k");
  const int64_t length = keys.dim() == 4 ? keys.size(2) : 0;
  const auto check_cache = [&](const char* name, const Tensor& cache, int64_t width) {
    DI_CHECK(cache.dim() == 4 && cache.size(0) == k.size(0) && cache.size(1) == k.size(2) &&
                 cache.size(2) == length && cache.size(3) == width,
             op, ": ", name, " must be [", k.size(0), ", ", k.size(2), ", length, ", width, "], got ",
             shape_of(cache));
  };
  check_cache("key_cache", keys, k.size(3));
  check_cache("value_cache", values, v.size(3));
  const auto check_type = [&](const char* name, const Tensor& t) {
    DI_CHECK(t.scalar_type() == dtype, op, ": ", name, " must have the dtype of the rotated k, ", name_of(dtype),
             ", got ", name_of(t.scalar_type()));
    check_same_device(op, name, t, q);
  };
  check_type("v", v);
  check_type("key_cache", keys);
  check_type("value_cache", values);
  const auto index = position.scalar_type();
  DI_CHECK(index == ScalarType::Int || index == ScalarType::Long, op,
           ": cache_position must be int32 or int64, got ", name_of(index));
  check_same_device(op, "cache_position", position, q);
  const auto check_apart = [&](const char* name, const Tensor& cache) {
    check_destination(op, name, cache, angles);
    DI_CHECK(!overlap(cache, q) && !overlap(cache, k) && !overlap(cache, v) && !overlap(cache, position), op, ": ",
             name, " is written and must not share memory with q, k, v or cache_position");
  };
  check_apart("key_cache", keys);
  check_apart("value_cache", values);
  DI_CHECK(!overlap(keys, values), op, ": key_cache and value_cache are written and must not share memory");
}

constexpr int kCacheDims[] = {0, 2, 1};  // of a cache: batch, slots of tokens, heads

// Strides of `position` along [batch, tokens, heads].
std::vector<int64_t> slot_strides(const char* op, const Tensor& position, const Tensor& q) {
  std::vector<int64_t> strides(3, 0);
  bool fits = position.dim() <= 2;
  for (int64_t d = 0; fits && d < position.dim(); ++d) {
    const int64_t at = 2 - position.dim() + d;
    fits = position.size(d) == q.size(at) || position.size(d) == 1;
    if (position.size(d) != 1) strides[at] = position.stride(d);
  }
  DI_CHECK(fits, op, ": cache_position of shape ", shape_of(position), " does not broadcast to the batch and tokens, [",
           q.size(0), ", ", q.size(1), "]");
  return strides;
}

// A tensor whose rows a kernel can write in the place of those of `cache`: itself, or a copy to be copied back.
std::optional<Tensor> staging(const Tensor& cache) {
  if (cache.size(3) <= 1 || cache.stride(3) == 1) return std::nullopt;
  return torch::stable::contiguous(cache);
}

// q rotated into a fresh tensor; k rotated and v into the caches.
Tensor rotated_into(const char* op, RopeArgs& args, const Tensor& q, const Tensor& k, Caches caches,
                    const Angles& angles) {
  const Tensor dense_q = with_dense_rows(q), dense_k = with_dense_rows(k), dense_v = with_dense_rows(caches.v);
  const auto staged_keys = staging(caches.keys), staged_values = staging(caches.values);
  const Tensor keys = staged_keys.value_or(caches.keys), values = staged_values.value_or(caches.values);
  const Tensor& position = caches.position;

  RopeCache& cache = args.cache;
  cache.slots = position.const_data_ptr();
  cache.wide_slots = position.scalar_type() == ScalarType::Long;
  cache.length = keys.size(2);
  cache.key_stride = keys.stride(2);
  cache.values = dense_v.const_data_ptr();
  cache.value_cache = const_cast<void*>(values.const_data_ptr());
  cache.value_size = dense_v.size(3);
  for (int d = 0; d < 3; ++d) {
    cache.sizes[d] = dense_v.size(d);
    cache.in_strides[d] = dense_v.stride(d);
    cache.out_strides[d] = values.stride(kCacheDims[d]);
  }
  const std::vector<int64_t> slots = slot_strides(op, position, q);
  std::copy_n(slots.begin(), 2, cache.slot_strides);
  check_indices(op, "cache_position", position, 0, cache.length);

  Tensor q_out = new_tensor(q, sizes_of(q), q.scalar_type());
  args.tensors[0] = walk(op, args, "q", dense_q, target_of(q_out, args.dtype), angles);
  const Place key_rows{keys.const_data_ptr(), {keys.stride(kCacheDims[0]), 0, keys.stride(kCacheDims[2])}};
  args.tensors[1] = walk(op, args, "k", dense_k, {key_rows, keys.size(3), slots}, angles);
  launch_rope(op, args, q, angles);
  if (staged_keys) torch::stable::copy_(caches.keys, *staged_keys);
  if (staged_values) torch::stable::copy_(caches.values, *staged_values);
  return q_out;
}

Tensor rotary_embedding_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                               Tensor key_cache, Tensor value_cache, const Tensor& cache_position,
                               const std::optional<Tensor>& positions, const std::string& style, bool inverse,
                               std::optional<int64_t> rotary_dim) {
  const char* op = "rotary_embedding_cache_";
  RopeArgs args{};
  const Angles angles = angles_of(cos, sin, positions);
  prepare(op, args, q, k, angles, style, inverse, rotary_dim);
  const Caches caches{v, key_cache, value_cache, cache_position};
  check_caches(op, q, k, caches, q.scalar_type(), angles);
  return rotated_into(op, args, q, k, caches, angles);
}

Tensor qk_norm_rope_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                           const std::optional<Tensor>& k_weight, const Tensor& cos, const Tensor& sin,
                           Tensor key_cache, Tensor value_cache, const Tensor& cache_position, double eps,
                           const std::optional<Tensor>& positions, const std::string& style, bool inverse,
                           std::optional<int64_t> rotary_dim, const std::string& form) {
  const char* op = "qk_norm_rope_cache_";
  RopeArgs args{};
  const Angles angles = angles_of(cos, sin, positions);
  prepare(op, args, q, k, angles, style, inverse, rotary_dim);
  const ScalarType normed = prepare_norm(op, args, q, k, q_weight, k_weight, eps, form);
  const Caches caches{v, key_cache, value_cache, cache_position};
  check_caches(op, q, k, caches, normed, angles);
  if (!is_one_kernel(args, q, normed)) {
    const Tensor normed_q = rms_norm(q, q_weight, eps, form), normed_k = rms_norm(k, k_weight, eps, form);
    return rotary_embedding_cache_(normed_q, normed_k, v, cos, sin, key_cache, value_cache, cache_position, positions,
                                   style, inverse, rotary_dim);
  }
  const DenseWeights weights(op, args, q_weight, k_weight);
  return rotated_into(op, args, q, k, caches, angles);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "rotary_embedding_cache_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache,"
      " Tensor(b!) value_cache, Tensor cache_position, Tensor? positions=None, str style=\"half\","
      " bool inverse=False, int? rotary_dim=None) -> Tensor");
  m.def(
      "qk_norm_rope_cache_(Tensor q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin,"
      " Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_position, float eps, *, Tensor? positions=None,"
      " str style=\"half\", bool inverse=False, int? rotary_dim=None, str weight_form=\"cast_mul\") -> Tensor");
}

static void implement(auto& m) {
  m.impl("rotary_embedding_cache_", TORCH_BOX(&rotary_embedding_cache_));
  m.impl("qk_norm_rope_cache_", TORCH_BOX(&qk_norm_rope_cache_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
