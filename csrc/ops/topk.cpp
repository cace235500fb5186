// topk: schema, argument checks, outputs.

#include "topk.h"

#include <algorithm>
#include <limits>

#include "../cpu/parallel.h"
#include "../cpu/topk.h"
#include "../cuda/topk.h"
#include "../npu/topk.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr const char* op = "topk";

// A contiguous int32 argument with one entry for each row of x.
std::optional<Tensor> row_argument(const char* name, const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return std::nullopt;
  check_same_device(op, name, *t, x);
  DI_CHECK(t->scalar_type() == ScalarType::Int, op, ": ", name, " must be int32, got ", name_of(t->scalar_type()));
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.pop_back();
  DI_CHECK(sizes_of(*t) == sizes, op, ": ", name, " must have the shape of x without its last dimension, got ",
           shape_of(*t), " for x ", shape_of(x));
  return torch::stable::contiguous(*t);
}

std::optional<Tensor> checked_page_table(const std::optional<Tensor>& table, int64_t page_size, const Tensor& x) {
  DI_CHECK(page_size >= 1, op, ": page_size must be at least 1, got ", page_size);
  if (!table) return std::nullopt;
  check_same_device(op, "page_table", *table, x);
  DI_CHECK(table->scalar_type() == ScalarType::Int, op, ": page_table must be int32, got ",
           name_of(table->scalar_type()));
  std::vector<int64_t> sizes = sizes_of(x), given = sizes_of(*table);
  DI_CHECK(given.size() == sizes.size() && std::equal(sizes.begin(), sizes.end() - 1, given.begin()) &&
               given.back() * page_size >= sizes.back(),
           op, ": page_table must have the leading dimensions of x and pages for ", sizes.back(), " elements, got ",
           shape_of(*table), " with page_size ", page_size);
  return torch::stable::contiguous(*table);
}

void launch_on_cpu(TopkArgs& args, const Tensor& x) {
  constexpr int64_t kLeastPart = 16384;
  const int64_t rows = args.x_rows.count, threads = torch::stable::get_num_threads();
  args.parts = 1;
  if (rows < threads) {
    const int64_t useful = args.row_size / std::max<int64_t>(kLeastPart, 4 * args.k);
    args.parts = int(std::clamp<int64_t>(useful, 1, (threads + rows - 1) / std::max<int64_t>(rows, 1)));
  }
  const int64_t cost = args.row_size * 4 / args.parts;
  if (args.parts == 1) return cpu::parallel(cpu::topk_rows, args, rows, cost);
  Tensor candidates = new_tensor(x, {rows, args.parts, args.k}, ScalarType::Long);
  Tensor counts = new_tensor(x, {rows, args.parts}, ScalarType::Long);
  args.candidates = static_cast<uint64_t*>(candidates.mutable_data_ptr());
  args.counts = static_cast<int64_t*>(counts.mutable_data_ptr());
  cpu::parallel(cpu::topk_parts, args, rows * args.parts, cost);
  cpu::parallel(cpu::topk_merge, args, rows, args.k * 8 * args.parts);
}

void launch_on_cuda(TopkArgs& args, const Tensor& x) {
  std::optional<Tensor> candidates;
  if (const int64_t scratch = cuda::topk_scratch(args); scratch > 0)
    args.candidates = static_cast<uint64_t*>(
        candidates.emplace(new_tensor(x, {args.x_rows.count, scratch}, ScalarType::Long)).mutable_data_ptr());
  cuda::topk(args, x.get_device_index());
}

void launch(TopkArgs& args, const Tensor& x) {
  if (x.is_cuda()) return launch_on_cuda(args, x);
  if (is_npu(x)) return npu::topk(args, x.get_device_index());
  launch_on_cpu(args, x);
}

std::tuple<Tensor, Tensor> topk(const Tensor& x, int64_t k, const std::optional<Tensor>& lengths,
                                const std::optional<Tensor>& offsets, bool sorted, bool sorted_index,
                                const std::optional<ScalarType>& index_dtype, bool return_values,
                                const std::optional<Tensor>& page_table, int64_t page_size, int64_t fill_index,
                                std::optional<double> fill_value) {
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  TopkArgs args{};
  args.dtype = float_dtype(op, "x", x);
  args.row_size = x.size(x.dim() - 1);
  DI_CHECK(args.row_size <= kMost, op, ": rows must have fewer than 2^31 elements, got ", args.row_size);
  DI_CHECK(k >= 0 && k <= kMost, op, ": k must lie in [0, 2^31), got ", k);
  DI_CHECK(!(sorted && sorted_index), op, ": sorted and sorted_index exclude each other");
  DI_CHECK(!(sorted && x.is_cuda() && k > (int64_t(1) << 30)), op,
           ": k must not exceed 2^30 for sorted results on a GPU, got ", k);
  const ScalarType to_index = index_dtype.value_or(ScalarType::Int);
  DI_CHECK(to_index == ScalarType::Int || to_index == ScalarType::Long, op,
           ": index_dtype must be int32 or int64, got ", name_of(to_index));
  args.k = k;
  args.order = sorted ? TopkOrder::by_value : TopkOrder::by_index;
  args.wide_index = to_index == ScalarType::Long;
  args.fill_index = fill_index;
  args.fill_value = float(fill_value.value_or(-std::numeric_limits<double>::infinity()));
  args.page_size = page_size;
  const std::optional<Tensor> dense_lengths = row_argument("lengths", lengths, x);
  const std::optional<Tensor> dense_offsets = row_argument("offsets", offsets, x);
  const std::optional<Tensor> table = checked_page_table(page_table, page_size, x);
  if (dense_lengths) args.lengths = static_cast<const int32_t*>(dense_lengths->const_data_ptr());
  if (dense_offsets) args.offsets = static_cast<const int32_t*>(dense_offsets->const_data_ptr());
  if (table) {
    args.page_table = static_cast<const int32_t*>(table->const_data_ptr());
    args.pages = table->size(table->dim() - 1);
  }
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = k;
  Tensor values = new_tensor(x, return_values ? sizes : std::vector<int64_t>{0}, x.scalar_type());
  Tensor indices = new_tensor(x, sizes, to_index);
  Tensor dense = with_dense_rows(x);
  args.x = dense.const_data_ptr();
  args.x_rows = rows_of(op, dense);
  args.values = return_values ? values.mutable_data_ptr() : nullptr;
  args.indices = indices.mutable_data_ptr();
  if (args.x_rows.count > 0 && k > 0) launch(args, x);
  return {values, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "topk(Tensor x, int k, Tensor? lengths=None, Tensor? offsets=None, *, bool sorted=False,"
      " bool sorted_index=False, ScalarType? index_dtype=None, bool return_values=True, Tensor? page_table=None,"
      " int page_size=1, int fill_index=-1, float? fill_value=None) -> (Tensor, Tensor)");
}

static void implement(auto& m) { m.impl("topk", TORCH_BOX(&topk)); }

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
