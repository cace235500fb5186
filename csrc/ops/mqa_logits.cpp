// mqa_logits and paged_mqa_logits: schemas, argument checks, outputs.

#include "mqa_logits.h"

#include <limits>

#include "../cpu/mqa_logits.h"
#include "../cpu/parallel.h"
#include "../cuda/mqa_logits.h"
#include "check.h"

namespace deepinfer {

namespace {

constexpr int64_t kScaleBytes = 4;

// A contiguous argument of this dtype and shape on the device of q.
Tensor checked(const char* op, const char* name, const Tensor& t, ScalarType dtype, const std::vector<int64_t>& sizes,
               const Tensor& q) {
  DI_CHECK(t.scalar_type() == dtype, op, ": ", name, " must be ", name_of(dtype), ", got ", name_of(t.scalar_type()));
  std::string wanted;
  for (int64_t n : sizes) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
  DI_CHECK(sizes_of(t) == sizes, op, ": ", name, " must have shape [", wanted, "], got ", shape_of(t));
  check_same_device(op, name, t, q);
  return torch::stable::contiguous(t);
}

void check_queries(const char* op, const Tensor& q, int64_t dims, const char* shape) {
  DI_CHECK(q.dim() == dims, op, ": q must have shape ", shape, ", got ", shape_of(q));
  DI_CHECK(q.scalar_type() == ScalarType::Float8_e4m3fn, op, ": q must be float8_e4m3fn, got ",
           name_of(q.scalar_type()));
  const int64_t depth = q.size(dims - 1);
  DI_CHECK(depth == 32 || depth == 64 || depth == 128, op, ": D must be 32, 64 or 128, got ", depth);
}

Tensor launch(const char* op, MqaLogitsArgs& args, const Tensor& q) {
  DI_CHECK(args.rows <= std::numeric_limits<int32_t>::max() && args.tokens <= std::numeric_limits<int32_t>::max(), op,
           ": more than 2^31 - 1 rows or tokens");
  Tensor out = new_tensor(q, {args.rows, args.tokens}, ScalarType::Float);
  args.out = static_cast<float*>(out.mutable_data_ptr());
  if (args.rows == 0 || args.tokens == 0) return out;
  if (q.is_cuda()) {
    cuda::mqa_logits(args, q.get_device_index());
    return out;
  }
  args.chunk = 1024;
  const int64_t chunks = (args.tokens + args.chunk - 1) / args.chunk;
  cpu::parallel(cpu::mqa_logits, args, args.rows * chunks, args.heads * args.chunk * args.depth);
  return out;
}

Tensor mqa_logits(const Tensor& q, const Tensor& k, const Tensor& k_scale, const Tensor& weights, const Tensor& begins,
                  const Tensor& ends) {
  const char* op = "mqa_logits";
  check_queries(op, q, 3, "[S, H, D]");
  const int64_t rows = q.size(0), heads = q.size(1), depth = q.size(2);
  DI_CHECK(k.dim() == 2, op, ": k must have shape [T, ", depth, "], got ", shape_of(k));
  const int64_t tokens = k.size(0);
  const Tensor dense_q = torch::stable::contiguous(q);
  const Tensor dense_k = checked(op, "k", k, ScalarType::Float8_e4m3fn, {tokens, depth}, q);
  const Tensor scale = checked(op, "k_scale", k_scale, ScalarType::Float, {tokens}, q);
  const Tensor dense_weights = checked(op, "weights", weights, ScalarType::Float, {rows, heads}, q);
  const Tensor low = checked(op, "begins", begins, ScalarType::Int, {rows}, q);
  const Tensor high = checked(op, "ends", ends, ScalarType::Int, {rows}, q);
  MqaLogitsArgs args{};
  args.q = dense_q.const_data_ptr();
  args.weights = static_cast<const float*>(dense_weights.const_data_ptr());
  args.begins = static_cast<const int32_t*>(low.const_data_ptr());
  args.ends = static_cast<const int32_t*>(high.const_data_ptr());
  args.rows = rows;
  args.heads = heads;
  args.depth = depth;
  args.tokens = tokens;
  args.k = static_cast<const uint8_t*>(dense_k.const_data_ptr());
  args.k_scale = static_cast<const float*>(scale.const_data_ptr());
  args.page_size = tokens;
  args.page_bytes = tokens * depth;
  args.pages = 1;
  if (!q.is_cuda())
    for (int64_t row = 0; row < rows; ++row)
      DI_CHECK(args.begins[row] >= 0 && args.ends[row] <= tokens, op, ": begins and ends must lie in [0, ", tokens,
               "], got ", args.begins[row], " and ", args.ends[row]);
  return launch(op, args, q);
}

// On a CPU, where this may be read: the pages that are used.
void check_pages(const char* op, const MqaLogitsArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    DI_CHECK(args.ends[row] >= 0 && args.ends[row] <= args.tokens, op, ": lengths must lie in [0, ", args.tokens,
             "], got ", args.ends[row]);
    for (int64_t i = 0; i * args.page_size < args.ends[row]; ++i) {
      const int32_t page = args.page_table[row / args.table_rows * args.table_stride + i];
      DI_CHECK(page >= 0 && page < args.pages, op, ": page_table must lie in [0, ", args.pages, "), got ", page);
    }
  }
}

Tensor paged_mqa_logits(const Tensor& q, const Tensor& cache, const Tensor& weights, const Tensor& lengths,
                        const Tensor& page_table, int64_t max_length) {
  const char* op = "paged_mqa_logits";
  check_queries(op, q, 4, "[B, N, H, D]");
  const int64_t batch = q.size(0), next = q.size(1), heads = q.size(2), depth = q.size(3);
  DI_CHECK(cache.dim() == 3, op, ": cache must have shape [pages, page_size, ", depth + kScaleBytes, "], got ",
           shape_of(cache));
  const int64_t pages = cache.size(0), page_size = cache.size(1);
  const Tensor dense_q = torch::stable::contiguous(q);
  const Tensor dense_cache =
      checked(op, "cache", cache, ScalarType::Byte, {pages, page_size, depth + kScaleBytes}, q);
  DI_CHECK(page_size > 0, op, ": the pages of cache must not be empty");
  const Tensor dense_weights = checked(op, "weights", weights, ScalarType::Float, {batch * next, heads}, q);
  const Tensor high = checked(op, "lengths", lengths, ScalarType::Int, {batch, next}, q);
  DI_CHECK(max_length >= 0, op, ": max_length must not be negative, got ", max_length);
  DI_CHECK(page_table.dim() == 2 && page_table.size(0) == batch && page_table.size(1) * page_size >= max_length, op,
           ": page_table must have shape [", batch, ", P] with pages for max_length ", max_length, ", got ",
           shape_of(page_table), " with pages of ", page_size);
  const Tensor table = checked(op, "page_table", page_table, ScalarType::Int, sizes_of(page_table), q);
  MqaLogitsArgs args{};
  args.q = dense_q.const_data_ptr();
  args.weights = static_cast<const float*>(dense_weights.const_data_ptr());
  args.ends = static_cast<const int32_t*>(high.const_data_ptr());
  args.rows = batch * next;
  args.heads = heads;
  args.depth = depth;
  args.tokens = max_length;
  args.k = static_cast<const uint8_t*>(dense_cache.const_data_ptr());
  args.page_table = static_cast<const int32_t*>(table.const_data_ptr());
  args.page_size = page_size;
  args.page_bytes = page_size * (depth + kScaleBytes);
  args.pages = pages;
  args.table_stride = table.size(1);
  args.table_rows = next;
  if (!q.is_cuda()) check_pages(op, args);
  return launch(op, args, q);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("mqa_logits(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor begins, Tensor ends) -> Tensor");
  m.def(
      "paged_mqa_logits(Tensor q, Tensor cache, Tensor weights, Tensor lengths, Tensor page_table, int max_length)"
      " -> Tensor");
}

static void implement(auto& m) {
  m.impl("mqa_logits", TORCH_BOX(&mqa_logits));
  m.impl("paged_mqa_logits", TORCH_BOX(&paged_mqa_logits));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
