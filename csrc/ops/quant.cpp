// The quantisation ops: schemas, argument checks, outputs. Only the launch depends on the device.

#include "quant.h"

#include <algorithm>

#include "../cpu/pages.h"
#include "../cpu/parallel.h"
#include "../cpu/quant.h"
#include "../cuda/quant.h"
#include "../npu/quant.h"
#include "quant_format.h"
#include "rows.h"

namespace deepinfer {

namespace {

std::string text_of(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t n : sizes) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

void check_block_size(const char* op, const std::vector<int64_t>& size) {
  bool valid = size.size() == 2;
  for (int64_t n : size) valid = valid && (n > 0 || n == -1);
  DI_CHECK(valid, op, ": block_size must be two numbers, positive or -1 for the whole dimension, got ", text_of(size));
}

// The elements of a tensor of shape `sizes` in blocks of [down, across], where -1 is the whole extent.
struct Cut {
  std::vector<int64_t> sizes;
  int64_t rows, columns;
  int64_t block_rows, block_columns;
  int64_t down, across;

  Cut(std::vector<int64_t> shape, int64_t wanted_rows, int64_t wanted_columns) : sizes(std::move(shape)) {
    rows = sizes.size() > 1 ? sizes[sizes.size() - 2] : 1;
    columns = sizes.back();
    block_rows = block_extent(wanted_rows, rows);
    block_columns = block_extent(wanted_columns, columns);
    down = blocks_in(rows, block_rows);
    across = blocks_in(columns, block_columns);
  }
};

// Describes `t`, whose last dimension is dense: the strided side of a kernel.
Blocks blocks_of(const char* op, const Tensor& t, const Cut& cut) {
  Blocks b{};
  const int64_t last = t.dim() - 1;
  const bool row_by_row = cut.block_rows == 1;
  b.matrices = rows_of(op, t, row_by_row ? 1 : 2);
  b.rows = row_by_row ? 1 : cut.rows;
  b.row_stride = row_by_row || last == 0 ? 0 : t.stride(last - 1);
  b.columns = cut.columns;
  b.block_rows = cut.block_rows;
  b.block_columns = cut.block_columns;
  b.down = row_by_row ? 1 : cut.down;
  b.across = cut.across;
  const int64_t wide_enough = 1024 / std::max<int64_t>(b.block_columns, 1);
  b.strip = b.block_columns == 1 ? int64_t(Blocks::kColumnStrip)
                                 : std::clamp<int64_t>(wide_enough, 1, Blocks::kMaxStrip);
  b.strips = blocks_in(b.across, b.strip);
  return b;
}

template <typename Args>
void launch_on_cpu(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, Tensor& out) {
  const Blocks& b = args.blocks;
  cpu::prefer_huge_pages(out.mutable_data_ptr(), out.numel() * int64_t(out.element_size()));
  cpu::parallel(kernel, args, b.matrices.count * b.down * b.strips, b.strip * b.block_rows * b.block_columns * 4);
}

void launch(const char* op, const QuantizeArgs& args, const Tensor& x, Tensor& out) {
  if (x.is_cuda()) return cuda::quantize(args, x.get_device_index());
  if (is_npu(x)) {
    npu::check_codes(op, args.code, args.scales.type, x.get_device_index());
    return npu::quantize(args, x.get_device_index());
  }
  launch_on_cpu(cpu::quantize, args, out);
}

QuantizeArgs quantize_args(const char* op, const Tensor& x, const Cut& cut, Code code) {
  QuantizeArgs args{};
  args.dtype = float_dtype(op, "x", x);
  args.x = x.const_data_ptr();
  args.blocks = blocks_of(op, x, cut);
  args.code = code;
  return args;
}

std::tuple<Tensor, Tensor> quantize(const char* op, const Tensor& x, const Cut& cut, const QuantFormat& format) {
  const Tensor dense = with_dense_rows(x);
  QuantizeArgs args = quantize_args(op, dense, cut, format.code);
  Tensor codes = new_codes(x, cut.sizes, format);
  Tensor scales = new_scales(op, x, cut.sizes, cut.down, cut.across, format, args.scales);
  args.codes = codes.mutable_data_ptr();
  launch(op, args, x, codes);
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_per_token_group(const Tensor& x, int64_t group_size,
                                                    std::optional<ScalarType> dtype, bool round_scale,
                                                    std::optional<ScalarType> scale_dtype, std::string scale_layout) {
  const char* op = "quantize_per_token_group";
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  DI_CHECK(group_size > 0 || group_size == -1, op, ": group_size must be positive, or -1 for the whole row, got ",
           group_size);
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  const Cut cut(sizes_of(x), 1, group_size);
  check_pairs(op, format.code, "group_size", group_size, cut.columns);
  return quantize(op, x, cut, format);
}

std::tuple<Tensor, Tensor> quantize_per_token(const Tensor& x, std::optional<ScalarType> dtype, bool round_scale,
                                              std::optional<ScalarType> scale_dtype, std::string scale_layout) {
  const char* op = "quantize_per_token";
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  DI_CHECK(x.size(x.dim() - 1) > 0, op, ": the last dimension of x must not be empty");
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  const Cut cut(sizes_of(x), 1, -1);
  check_pairs(op, format.code, "group_size", -1, cut.columns);
  return quantize(op, x, cut, format);
}

std::tuple<Tensor, Tensor> quantize_per_block(const Tensor& x, std::vector<int64_t> block_size,
                                              std::optional<ScalarType> dtype, bool round_scale,
                                              std::optional<ScalarType> scale_dtype, std::string scale_layout) {
  const char* op = "quantize_per_block";
  DI_CHECK(x.dim() >= 2, op, ": x must have at least two dimensions");
  check_block_size(op, block_size);
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  const Cut cut(sizes_of(x), block_size[0], block_size[1]);
  check_pairs(op, format.code, "block_size[1]", block_size[1], cut.columns, true);
  return quantize(op, x, cut, format);
}

std::tuple<Tensor, Tensor> quantize_per_channel(const Tensor& x, int64_t block_rows, std::optional<ScalarType> dtype,
                                                bool round_scale, std::optional<ScalarType> scale_dtype,
                                                std::string scale_layout) {
  const char* op = "quantize_per_channel";
  DI_CHECK(x.dim() >= 2, op, ": x must have at least two dimensions");
  DI_CHECK(block_rows > 0 || block_rows == -1, op, ": block_rows must be positive, or -1 for all rows, got ",
           block_rows);
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  const Cut cut(sizes_of(x), block_rows, 1);
  check_pairs(op, format.code, "block_rows", 1, cut.columns, true);
  return quantize(op, x, cut, format);
}

Tensor quantization_scales(const Tensor& x, std::vector<int64_t> block_size, std::optional<ScalarType> dtype,
                           bool round_scale, std::optional<ScalarType> scale_dtype, std::string scale_layout) {
  const char* op = "quantization_scales";
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  check_block_size(op, block_size);
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  const Cut cut(sizes_of(x), block_size[0], block_size[1]);
  check_pairs(op, format.code, "block_size[1]", block_size[1], cut.columns, true);
  const Tensor dense = with_dense_rows(x);
  QuantizeArgs args = quantize_args(op, dense, cut, format.code);
  Tensor scales = new_scales(op, x, cut.sizes, cut.down, cut.across, format, args.scales);
  launch(op, args, x, scales);
  return scales;
}

// Where given scales lie. `held` keeps a copy alive if no single stride leads through their leading dimensions.
Scales given_scales(const char* op, const Tensor& scales, const Cut& cut, const Tensor& like, Tensor& held) {
  const ScaleType type = scale_type_of(op, "scales", scales.scalar_type());
  check_same_device(op, "scales", scales, like);
  const std::vector<int64_t> expected = scale_sizes(cut.sizes, cut.down, cut.across, type);
  DI_CHECK(sizes_of(scales) == expected, op, ": scales must have shape ", text_of(expected), ", got ",
           shape_of(scales));
  int64_t bands = 1;
  for (int64_t d = 0; d + 1 < scales.dim(); ++d) bands *= scales.size(d);
  DI_CHECK(bands >> 32 == 0, op, ": scales must have fewer than 2^32 rows, got shape ", shape_of(scales));
  held = scales.dim() > Rows::kMaxDims ? torch::stable::contiguous(scales) : scales;
  Rows leading = rows_of(op, held, 2);
  bool far = false;  // strides that the kernels do not take
  for (int64_t d = std::max<int64_t>(held.dim() - 2, 0); d < held.dim(); ++d) far = far || held.stride(d) >> 32 != 0;
  if (leading.dims > 1 || far) {
    held = torch::stable::contiguous(held);
    leading = rows_of(op, held, 2);
  }
  const int64_t last = held.dim() - 1;
  Scales result{};
  result.data = const_cast<void*>(held.const_data_ptr());
  result.rows = leading.count == 1 ? std::max<int64_t>(cut.down, 1) : cut.down;
  result.matrix = leading.dims ? leading.strides[0] : 0;
  result.row = last > 0 ? uint32_t(held.stride(last - 1)) : 0;
  result.column = uint32_t(held.stride(last));
  result.across = cut.across;
  result.type = type;
  return result;
}

Tensor quantize_with_scales(const Tensor& x, const Tensor& scales, std::vector<int64_t> block_size,
                            std::optional<ScalarType> dtype) {
  const char* op = "quantize_with_scales";
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  float_dtype(op, "x", x);
  const QuantFormat format = quant_format(op, dtype, false, std::nullopt, "row");
  check_block_size(op, block_size);
  const Cut cut(sizes_of(x), block_size[0], block_size[1]);
  check_pairs(op, format.code, "block_size[1]", block_size[1], cut.columns, true);
  const Tensor dense = with_dense_rows(x);
  QuantizeArgs args = quantize_args(op, dense, cut, format.code);
  Tensor held = scales;
  args.scales = given_scales(op, scales, cut, x, held);
  args.given = true;
  Tensor codes = new_codes(x, cut.sizes, format);
  args.codes = codes.mutable_data_ptr();
  launch(op, args, x, codes);
  return codes;
}

Tensor dequantize(const Tensor& q, const Tensor& scales, std::vector<int64_t> block_size,
                  std::optional<ScalarType> dtype) {
  const char* op = "dequantize";
  DequantizeArgs args{};
  DI_CHECK(q.dim() >= 1, op, ": q must have at least one dimension");
  args.code = code_of(op, "q", q.scalar_type());
  scale_type_of(op, "scales", scales.scalar_type());
  check_block_size(op, block_size);
  std::vector<int64_t> sizes = sizes_of(q);
  if (args.code == Code::e2m1) sizes.back() *= 2;
  const Cut cut(sizes, block_size[0], block_size[1]);
  check_pairs(op, args.code, "block_size[1]", block_size[1], cut.columns, true);
  const Tensor dense = with_dense_rows(q);
  args.codes = dense.const_data_ptr();
  args.blocks = blocks_of(op, dense, cut);
  Tensor held = scales;
  args.scales = given_scales(op, scales, cut, q, held);
  Tensor out = new_tensor(q, sizes, dtype.value_or(ScalarType::BFloat16));
  args.dtype = float_dtype(op, "dtype", out);
  args.out = out.mutable_data_ptr();
  if (q.is_cuda()) {
    cuda::dequantize(args, q.get_device_index());
  } else if (is_npu(q)) {
    npu::check_codes(op, args.code, args.scales.type, q.get_device_index());
    npu::dequantize(args, q.get_device_index());
  } else {
    launch_on_cpu(cpu::dequantize, args, out);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "quantize_per_token_group(Tensor x, int group_size=128, *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None, str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "quantize_per_token(Tensor x, *, ScalarType? dtype=None, bool round_scale=False, ScalarType? scale_dtype=None,"
      " str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "quantize_per_block(Tensor x, int[] block_size=[128, 128], *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None, str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "quantize_per_channel(Tensor x, int block_rows=128, *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None, str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "quantization_scales(Tensor x, int[] block_size, *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None, str scale_layout=\"row\") -> Tensor");
  m.def("quantize_with_scales(Tensor x, Tensor scales, int[] block_size, *, ScalarType? dtype=None) -> Tensor");
  m.def("dequantize(Tensor q, Tensor scales, int[] block_size, ScalarType? dtype=None) -> Tensor");
}

static void implement(auto& m) {
  m.impl("quantize_per_token_group", TORCH_BOX(&quantize_per_token_group));
  m.impl("quantize_per_token", TORCH_BOX(&quantize_per_token));
  m.impl("quantize_per_block", TORCH_BOX(&quantize_per_block));
  m.impl("quantize_per_channel", TORCH_BOX(&quantize_per_channel));
  m.impl("quantization_scales", TORCH_BOX(&quantization_scales));
  m.impl("quantize_with_scales", TORCH_BOX(&quantize_with_scales));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
