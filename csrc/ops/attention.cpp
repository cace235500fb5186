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

void check_rope(const AttentionArgs& args, const Tensor& query, const std::optional<Tensor>& query_rope,
                const std::optional<Tensor>& key_rope) {
  DI_CHECK(query_rope && key_rope, kOp, ": query_rope and key_rope go together");
  check_heads("query_rope", *query_rope, "[batch, heads, queries, r]");
  const int64_t rope = query_rope->size(3);
  DI_CHECK(query_rope->size(0) == args.batch && query_rope->size(1) == args.heads &&
               query_rope->size(2) == args.queries,
           kOp, ": query_rope must have the batch, heads and queries of query, [", args.batch, ", ", args.heads, ", ",
           args.queries, ", r], got ", shape_of(*query_rope));
  DI_CHECK(args.depth + rope <= kMostDepth, kOp, ": query and query_rope must have at most ", kMostDepth,
           " columns together, got ", args.depth + rope);
  DI_CHECK(key_rope->dim() == 4 && key_rope->size(0) == args.batch &&
               (key_rope->size(1) == args.key_heads || key_rope->size(1) == 1) && key_rope->size(2) == args.keys &&
               key_rope->size(3) == rope,
           kOp, ": key_rope must have shape [", args.batch, ", ", args.key_heads, " or 1, ", args.keys, ", ", rope,
           "], got ", shape_of(*key_rope));
  check_like_query("query_rope", *query_rope, query);
  check_like_query("key_rope", *key_rope, query);
}

// The columns of `t` with those of `rope` behind them, for each head of `t`.
Tensor with_rope(const Tensor& t, const Tensor& rope) {
  const int64_t heads = t.size(1), depth = t.size(3), more = rope.size(3);
  Tensor whole = new_tensor(t, {t.size(0), t.size(2), heads, depth + more}, t.scalar_type());
  Tensor by_head = torch::stable::transpose(whole, 1, 2);
  Tensor first = torch::stable::narrow(by_head, 3, 0, depth), second = torch::stable::narrow(by_head, 3, depth, more);
  torch::stable::copy_(first, t);
  torch::stable::copy_(second, rope);
  return by_head;
}

// Without putting the columns together, if a kernel can.
bool attention_of_parts(AttentionArgs args, const Tensor& query, const Tensor& key, const Tensor& query_rope,
                        const Tensor& key_rope) {
  if (!query.is_cuda() || query.stride(3) != 1 || key.stride(3) != 1 || query_rope.stride(3) != 1 ||
      key_rope.stride(3) != 1)
    return false;
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.query_rope = query_rope.const_data_ptr();
  args.key_rope = key_rope.const_data_ptr();
  args.rope_depth = query_rope.size(3);
  args.query_strides = strides_of(query);
  args.key_strides = strides_of(key);
  args.query_rope_strides = strides_of(query_rope);
  args.key_rope_strides = strides_of(key_rope);
  if (key_rope.size(1) == 1) args.key_rope_strides.head = 0;
  return cuda::attention_of_parts(args, query.get_device_index());
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 std::optional<double> scale, bool causal, const std::optional<Tensor>& query_rope,
                 const std::optional<Tensor>& key_rope) {
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
  const bool has_rope = query_rope || key_rope;
  if (has_rope) check_rope(args, query, query_rope, key_rope);
  const int64_t columns = args.depth + (has_rope ? query_rope->size(3) : 0);
  args.scale = scale ? float(*scale) : float(1 / std::sqrt(double(columns)));

  // [batch, queries, heads, d_v] in memory: what follows takes the heads of a token for one row.
  Tensor out = torch::stable::transpose(
      new_tensor(query, {args.batch, args.queries, args.heads, args.value_depth}, query.scalar_type()), 1, 2);
  const int64_t rows = args.batch * args.heads * args.queries;
  if (rows == 0) return out;
  const Tensor v = with_dense_tokens(value);
  args.value = v.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.value_strides = strides_of(v);
  args.out_strides = strides_of(out);
  if (has_rope && attention_of_parts(args, query, key, *query_rope, *key_rope)) return out;
  const Tensor q = has_rope ? with_rope(query, *query_rope) : with_dense_tokens(query);
  const Tensor k = has_rope ? with_rope(key, *key_rope) : with_dense_tokens(key);
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.depth = columns;
  args.query_strides = strides_of(q);
  args.key_strides = strides_of(k);
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
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, *, float? scale=None, bool causal=False,"
      " Tensor? query_rope=None, Tensor? key_rope=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("attention", TORCH_BOX(&attention)); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { m.impl("attention", TORCH_BOX(&attention)); }

}  // namespace deepinfer
