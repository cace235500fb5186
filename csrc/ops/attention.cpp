// attention: schema, argument checks, output.

#include "attention.h"

#include <cmath>
#include <limits>
#include <optional>

#include "../cpu/attention.h"
#include "../cpu/parallel.h"
#include "../cuda/attention.h"
#include "check.h"

namespace deepinfer {

namespace {

constexpr const char* kOp = "attention";
constexpr int64_t kMostDepth = 256;

void check_heads(const char* name, const Tensor& t, const char* shape) {
  DI_CHECK(t.dim() == 4, kOp, ": ", name, " must have shape ", shape, ", got ", shape_of(t));
  const int64_t depth = t.size(3);
  DI_CHECK(depth >= 8 && depth <= kMostDepth && depth % 8 == 0, kOp, ": the last dimension of ", name,
           " must be a multiple of 8 up to ", kMostDepth, ", got ", depth);
}

void check_like_query(const char* name, const Tensor& t, const Tensor& query) {
  DI_CHECK(t.scalar_type() == query.scalar_type(), kOp, ": ", name, " must have the dtype of query, ",
           name_of(query.scalar_type()), ", got ", name_of(t.scalar_type()));
  check_same_device(kOp, name, t, query);
}

// `t` itself if the elements of a token are dense, else a contiguous copy.
Tensor with_dense_tokens(const Tensor& t) { return t.stride(3) == 1 ? t : torch::stable::contiguous(t); }

HeadStrides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

void set_mask(AttentionArgs& args, const Tensor& mask, const Tensor& query) {
  const ScalarType type = mask.scalar_type();
  DI_CHECK(type == ScalarType::Bool || type == ScalarType::Float || type == query.scalar_type(), kOp,
           ": mask must be bool, float32 or of the dtype of query, ", name_of(query.scalar_type()), ", got ",
           name_of(type));
  check_same_device(kOp, "mask", mask, query);
  const int64_t wanted[] = {args.batch, args.heads, args.queries, args.keys};
  int64_t* strides[] = {&args.mask_batch, &args.mask_head, &args.mask_query, &args.mask_key};
  bool fits = mask.dim() <= 4;
  for (int64_t d = 0; fits && d < mask.dim(); ++d) {
    const int64_t at = d + 4 - mask.dim(), size = mask.size(d);
    fits = size == 1 || size == wanted[at];
    *strides[at] = size == 1 ? 0 : mask.stride(d);
  }
  DI_CHECK(fits, kOp, ": mask must broadcast to [", args.batch, ", ", args.heads, ", ", args.queries, ", ", args.keys,
           "], got ", shape_of(mask));
  args.mask = mask.const_data_ptr();
  args.mask_kind = type == ScalarType::Bool ? AttentionMask::boolean : AttentionMask::added;
  args.mask_type = type == ScalarType::Bool ? DType::f32 : float_dtype(kOp, "mask", mask);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 std::optional<double> scale, bool causal) {
  AttentionArgs args{};
  args.type = float_dtype(kOp, "query", query);
  check_heads("query", query, "[batch, heads, queries, d]");
  check_heads("key", key, "[batch, key_heads, keys, d]");
  check_heads("value", value, "[batch, key_heads, keys, d_v]");
  check_like_query("key", key, query);
  check_like_query("value", value, query);
  args.batch = query.size(0);
  args.heads = query.size(1);
  args.queries = query.size(2);
  args.depth = query.size(3);
  args.key_heads = key.size(1);
  args.keys = key.size(2);
  args.value_depth = value.size(3);
  DI_CHECK(key.size(0) == args.batch && key.size(3) == args.depth, kOp,
           ": key must have the batch and the last dimension of query, ", args.batch, " and ", args.depth, ", got ",
           shape_of(key));
  DI_CHECK(value.size(0) == args.batch && value.size(1) == args.key_heads && value.size(2) == args.keys, kOp,
           ": value must have the batch, heads and keys of key, [", args.batch, ", ", args.key_heads, ", ", args.keys,
           ", d_v], got ", shape_of(value));
  DI_CHECK(args.key_heads > 0 && args.heads % args.key_heads == 0, kOp,
           ": the heads of key must divide those of query, ", args.heads, ", got ", args.key_heads);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  DI_CHECK(args.batch * args.heads <= most && args.queries <= most && args.keys <= most, kOp,
           ": more than 2^31 - 1 heads, queries or keys");
  DI_CHECK(!(causal && mask), kOp, ": causal attention takes no mask");
  args.mask_kind = causal ? AttentionMask::causal : AttentionMask::none;
  if (mask) set_mask(args, *mask, query);
  args.scale = scale ? float(*scale) : float(1 / std::sqrt(double(args.depth)));

  // [batch, queries, heads, d_v] in memory: what follows takes the heads of a token for one row.
  Tensor out = torch::stable::transpose(
      new_tensor(query, {args.batch, args.queries, args.heads, args.value_depth}, query.scalar_type()), 1, 2);
  const Tensor q = with_dense_tokens(query), k = with_dense_tokens(key), v = with_dense_tokens(value);
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.query_strides = strides_of(q);
  args.key_strides = strides_of(k);
  args.value_strides = strides_of(v);
  args.out_strides = strides_of(out);
  const int64_t rows = args.batch * args.heads * args.queries;
  if (rows == 0) return out;
  if (query.is_cuda()) {
    const int device = query.get_device_index();
    const int64_t floats = cuda::attention_scratch(args, device);
    if (floats == 0) {
      cuda::attention(args, nullptr, device);
    } else {
      Tensor scratch = new_tensor(query, {floats}, ScalarType::Float);
      cuda::attention(args, static_cast<float*>(scratch.mutable_data_ptr()), device);
    }
  } else {
    cpu::parallel(cpu::attention, args, rows, args.keys * (args.depth + args.value_depth));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, *, float? scale=None, bool causal=False)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("attention", TORCH_BOX(&attention)); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { m.impl("attention", TORCH_BOX(&attention)); }

}  // namespace deepinfer
