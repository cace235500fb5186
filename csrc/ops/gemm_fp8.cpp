// fp8_gemm, fp8_grouped_mm, fp8_masked_mm and fp8_masked_mm_: schemas, argument checks, the layout of scales, outputs.

#include <limits>

#include "../cpu/gemm_fp8.h"
#include "../cpu/parallel.h"
#include "../cuda/gemm.h"
#include "gemm_common.h"
#include "overlap.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr int64_t kBlock = 128;  // of k, and of columns of the weight, that a scale is for

int64_t blocks_in(int64_t size) { return (size + kBlock - 1) / kBlock; }

void check_e4m3(const char* op, const char* argument, const Tensor& t) {
  DI_CHECK(t.scalar_type() == ScalarType::Float8_e4m3fn, op, ": ", argument, " must be float8_e4m3fn, got ",
           name_of(t.scalar_type()));
}

// As float32, which holds every power of two that float8_e8m0fnu has.
Tensor scales_of(const char* op, const char* argument, const Tensor& scale, const Tensor& x) {
  DI_CHECK(scale.scalar_type() == ScalarType::Float || scale.scalar_type() == ScalarType::Float8_e8m0fnu, op, ": ",
           argument, " must be float32 or float8_e8m0fnu, got ", name_of(scale.scalar_type()));
  check_same_device(op, argument, scale, x);
  return torch::stable::to(scale, ScalarType::Float);
}

ScalarType result_type(const char* op, std::optional<ScalarType> out_dtype) {
  const ScalarType type = out_dtype.value_or(ScalarType::BFloat16);
  DI_CHECK(is_float_dtype(type), op, ": out_dtype must be float32, bfloat16 or float16, got ", name_of(type));
  return type;
}

// The scales of x, [rows or 1, blocks or 1], as the kernels read them: dense along the rows, and the rows of one block
// at a multiple of 16 bytes.
Tensor token_scales(const Tensor& scale, int64_t rows) {
  const bool suits = scale.size(0) == rows && (rows == 1 || scale.stride(0) == 1) &&
                     (scale.size(1) == 1 || (scale.stride(1) >= rows && scale.stride(1) % 4 == 0)) &&
                     reinterpret_cast<uintptr_t>(scale.const_data_ptr()) % 16 == 0;
  if (suits) return scale;
  Tensor padded = new_tensor(scale, {scale.size(1), (rows + 3) / 4 * 4}, ScalarType::Float);
  Tensor dense = torch::stable::narrow(padded, 1, 0, rows);
  torch::stable::copy_(dense, torch::stable::transpose(scale, 0, 1));
  return torch::stable::transpose(dense, 0, 1);
}

// What a product holds on to while it is launched.
struct Scales {
  Tensor x, weight;
};

// x_scale: [rows or 1, blocks or 1]; weight_scale: [experts, columns, their blocks or 1, blocks or 1].
void set_scales(MatmulArgs& args, const Scales& scales) {
  args.e4m3 = true;
  args.x_scale = static_cast<const float*>(scales.x.const_data_ptr());
  args.x_scale_depth_stride = scales.x.size(1) > 1 ? scales.x.stride(1) : 0;
  args.weight_scale = static_cast<const float*>(scales.weight.const_data_ptr());
  const auto stride = [&](int64_t d) { return scales.weight.size(d) > 1 ? scales.weight.stride(d) : 0; };
  args.scale_expert_stride = stride(0);
  args.scale_column_stride = stride(1);
  args.scale_depth_stride = stride(2);
  args.column_scales = scales.weight.size(1) == args.columns && args.columns > 1;
}

// On a CPU the operands are multiplied as float32.
Tensor widened(const Tensor& codes, const float* scales, int64_t scale_rows, int64_t row_stride, int64_t depth_stride) {
  const Tensor dense = torch::stable::contiguous(codes);
  Tensor out = new_tensor(codes, sizes_of(codes), ScalarType::Float);
  const int64_t depth = codes.size(1);
  const WidenArgs args{dense.const_data_ptr(), static_cast<float*>(out.mutable_data_ptr()), depth, scales, scale_rows,
                       row_stride, depth_stride};
  cpu::parallel(cpu::widen_e4m3, args, codes.size(0), depth * 5);
  return out;
}

void launch(MatmulArgs& args, Tensor& out, const Tensor& x, const Tensor& weight, const Scales& scales) {
  set_scales(args, scales);
  args.out = out.mutable_data_ptr();
  args.scale = 1;
  if (x.is_cuda()) {
    const Tensor x_operand = as_e4m3_operand(x), weight_operand = as_e4m3_operand(weight);
    set_x(args, x_operand);
    set_weight(args, weight_operand);
    return matmul(args, x);
  }
  const int64_t experts = args.experts, columns = args.columns, depth = args.depth;
  const Tensor flat_x = torch::stable::reshape(x, {args.rows, depth});
  const Tensor wide_x = widened(flat_x, args.x_scale, 1, scales.x.size(0) > 1 ? scales.x.stride(0) : 0,
                                args.x_scale_depth_stride);
  Tensor wide_weight = new_tensor(x, {experts, columns, depth}, ScalarType::Float);
  for (int64_t e = 0; e < experts; ++e) {
    const Tensor one = weight.dim() == 3 ? torch::stable::select(weight, 0, e) : weight;
    Tensor to = torch::stable::select(wide_weight, 0, e);
    torch::stable::copy_(to, widened(one, args.weight_scale + e * args.scale_expert_stride,
                                     args.column_scales ? 1 : kBlock, args.scale_column_stride,
                                     args.scale_depth_stride));
  }
  args.e4m3 = false;
  args.dtype = DType::f32;
  set_x(args, wide_x);
  set_weight(args, wide_weight);
  if (args.out_dtype == DType::f32) return matmul(args, x);
  Tensor sums = torch::stable::contiguous(torch::stable::to(out, ScalarType::Float));  // with what is not written
  args.out = sums.mutable_data_ptr();
  args.out_stride = args.columns;
  args.out_dtype = DType::f32;
  matmul(args, x);
  torch::stable::copy_(out, sums);
}

// The dimensions of a scale: each is 1 or as given.
bool has_shape(const Tensor& scale, std::initializer_list<std::pair<int64_t, int64_t>> either) {
  if (scale.dim() != int64_t(either.size())) return false;
  int64_t d = 0;
  for (const auto& [size, other] : either) {
    const int64_t given = scale.size(d++);
    if (given != size && given != other && given != 1) return false;
  }
  return true;
}

Tensor fp8_gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                std::optional<ScalarType> out_dtype) {
  const char* op = "fp8_gemm";
  MatmulArgs args{};
  DI_CHECK(a.dim() == 2, op, ": a must have shape [M, K], got ", shape_of(a));
  check_e4m3(op, "a", a);
  args.rows = a.size(0);
  args.depth = a.size(1);
  DI_CHECK(b.dim() == 2 && b.size(0) == args.depth, op, ": b must have shape [", args.depth, ", N], got ",
           shape_of(b));
  check_e4m3(op, "b", b);
  check_same_device(op, "b", b, a);
  args.columns = b.size(1);
  args.experts = 1;
  const int64_t k_blocks = blocks_in(args.depth), n_blocks = blocks_in(args.columns);
  DI_CHECK(has_shape(a_scale, {{args.rows, args.rows}, {k_blocks, k_blocks}}), op, ": a_scale must have shape [",
           args.rows, " or 1, ", k_blocks, " or 1], got ", shape_of(a_scale));
  DI_CHECK(has_shape(b_scale, {{k_blocks, k_blocks}, {args.columns, n_blocks}}), op, ": b_scale must have shape [",
           k_blocks, " or 1, ", args.columns, " or ", n_blocks, " or 1], got ", shape_of(b_scale));
  const Tensor x_scale = token_scales(scales_of(op, "a_scale", a_scale, a), args.rows);
  const Tensor weight_scale = scales_of(op, "b_scale", b_scale, a);
  const ScalarType result = result_type(op, out_dtype);
  Tensor out = new_tensor(a, {args.rows, args.columns}, result);
  args.out_dtype = float_dtype(op, "out", out);
  args.out_stride = args.columns;
  launch(args, out, a, torch::stable::transpose(b, 0, 1),
         {x_scale, torch::stable::unsqueeze(torch::stable::transpose(weight_scale, 0, 1), 0)});
  return out;
}

// Checks everything but the rows of x and multiplies, into `out` or into a new tensor.
Tensor grouped(const char* op, MatmulArgs& args, const Tensor& x, const Tensor& weight, const char* groups_name,
               const Tensor& groups, const Tensor& x_scale, const Tensor& weight_scale,
               std::optional<ScalarType> out_dtype, const Tensor* out = nullptr) {
  check_e4m3(op, "x", x);
  args.depth = x.size(x.dim() - 1);
  DI_CHECK(weight.dim() == 3 && weight.size(1) == args.depth, op, ": weight must have shape [E, ", args.depth,
           ", N], got ", shape_of(weight));
  check_e4m3(op, "weight", weight);
  check_same_device(op, "weight", weight, x);
  args.experts = weight.size(0);
  args.columns = weight.size(2);
  DI_CHECK(groups.scalar_type() == ScalarType::Int, op, ": ", groups_name, " must be int32, got ",
           name_of(groups.scalar_type()));
  DI_CHECK(groups.dim() == 1 && groups.size(0) == args.experts, op, ": ", groups_name, " must have shape [",
           args.experts, "], got ", shape_of(groups));
  check_same_device(op, groups_name, groups, x);
  DI_CHECK(!x.is_cuda() || args.experts <= cuda::kMostExperts, op, ": at most ", cuda::kMostExperts,
           " experts on a GPU, got ", args.experts);
  const int64_t k_blocks = blocks_in(args.depth), n_blocks = blocks_in(args.columns);
  std::vector<int64_t> scale_sizes = sizes_of(x);
  scale_sizes.back() = k_blocks;
  DI_CHECK(sizes_of(x_scale) == scale_sizes, op, ": x_scale must have the leading shape of x and ", k_blocks,
           " columns, got ", shape_of(x_scale));
  DI_CHECK(has_shape(weight_scale, {{args.experts, args.experts}, {k_blocks, k_blocks}, {args.columns, n_blocks}}), op,
           ": weight_scale must have shape [", args.experts, " or 1, ", k_blocks, " or 1, ", args.columns, " or ",
           n_blocks, " or 1], got ", shape_of(weight_scale));
  const Tensor flat_scale = torch::stable::reshape(scales_of(op, "x_scale", x_scale, x), {args.rows, k_blocks});
  const Tensor weight_scales = scales_of(op, "weight_scale", weight_scale, x);
  const Tensor dense_groups = torch::stable::contiguous(groups);
  args.groups = static_cast<const int32_t*>(dense_groups.const_data_ptr());
  if (!x.is_cuda()) check_groups(op, groups_name, args);
  const ScalarType result = result_type(op, out_dtype);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = args.columns;
  if (out) check_masked_result(op, *out, x, args.columns);
  const bool plain = !out || has_plain_rows(*out);
  Tensor to = !out ? new_tensor(x, sizes, result) : plain ? *out : torch::stable::contiguous(*out);
  args.out_dtype = float_dtype(op, "out", to);
  args.out_stride = row_stride(to);
  args.fill = !out;
  launch(args, to, x, torch::stable::transpose(weight, 1, 2),
         {token_scales(flat_scale, args.rows), torch::stable::transpose(weight_scales, 1, 2)});
  if (!plain) {
    Tensor given = *out;
    torch::stable::copy_(given, to);
  }
  return to;
}

Tensor fp8_grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const Tensor& x_scale,
                      const Tensor& weight_scale, std::optional<ScalarType> out_dtype) {
  const char* op = "fp8_grouped_mm";
  DI_CHECK(x.dim() == 2, op, ": x must have shape [P, K], got ", shape_of(x));
  MatmulArgs args{};
  args.rows = x.size(0);
  args.row_groups = RowGroups::ends;
  return grouped(op, args, x, weight, "offsets", offsets, x_scale, weight_scale, out_dtype);
}

Tensor masked(const char* op, const Tensor& x, const Tensor& weight, const Tensor& counts, const Tensor& x_scale,
              const Tensor& weight_scale, std::optional<ScalarType> out_dtype, const Tensor* out) {
  DI_CHECK(x.dim() == 3 && x.size(0) == weight.size(0), op, ": x must have shape [E, M, K] with the E of weight, got ",
           shape_of(x));
  MatmulArgs args{};
  args.group_rows = x.size(1);
  args.rows = x.size(0) * x.size(1);
  args.row_groups = RowGroups::counts;
  return grouped(op, args, x, weight, "counts", counts, x_scale, weight_scale, out_dtype, out);
}

Tensor fp8_masked_mm(const Tensor& x, const Tensor& weight, const Tensor& counts, const Tensor& x_scale,
                     const Tensor& weight_scale, std::optional<ScalarType> out_dtype) {
  return masked("fp8_masked_mm", x, weight, counts, x_scale, weight_scale, out_dtype, nullptr);
}

void fp8_masked_mm_(Tensor out, const Tensor& x, const Tensor& weight, const Tensor& counts, const Tensor& x_scale,
                    const Tensor& weight_scale) {
  const char* op = "fp8_masked_mm_";
  for (const Tensor& t : {x, weight, counts, x_scale, weight_scale})
    DI_CHECK(!overlap(out, t), op, ": out is written and must not share memory with another argument");
  masked(op, x, weight, counts, x_scale, weight_scale, out.scalar_type(), &out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("fp8_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "fp8_grouped_mm(Tensor x, Tensor weight, Tensor offsets, Tensor x_scale, Tensor weight_scale, *,"
      " ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "fp8_masked_mm_(Tensor(a!) out, Tensor x, Tensor weight, Tensor counts, Tensor x_scale, Tensor weight_scale)"
      " -> ()");
  m.def(
      "fp8_masked_mm(Tensor x, Tensor weight, Tensor counts, Tensor x_scale, Tensor weight_scale, *,"
      " ScalarType? out_dtype=None) -> Tensor");
}

static void implement(auto& m) {
  m.impl("fp8_gemm", TORCH_BOX(&fp8_gemm));
  m.impl("fp8_grouped_mm", TORCH_BOX(&fp8_grouped_mm));
  m.impl("fp8_masked_mm", TORCH_BOX(&fp8_masked_mm));
  m.impl("fp8_masked_mm_", TORCH_BOX(&fp8_masked_mm_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
