// quantize_per_token_group, quantize_per_block and dequantize: schemas, argument checks, outputs.

#include "../cpu/quant.h"

#include "../cpu/pages.h"
#include "../cpu/parallel.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

Code code_of(const char* op, const char* argument, ScalarType type) {
  if (type == ScalarType::Float8_e4m3fn) return Code::e4m3;
  if (type == ScalarType::Char) return Code::int8;
  fail(op, ": ", argument, " must be float8_e4m3fn or int8, got ", name_of(type));
}

bool is_e8m0(const char* op, const char* argument, ScalarType type) {
  if (type == ScalarType::Float8_e8m0fnu) return true;
  DI_CHECK(type == ScalarType::Float, op, ": ", argument, " must be float32 or float8_e8m0fnu, got ", name_of(type));
  return false;
}

std::string text_of(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t n : sizes) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

int64_t block_extent(int64_t wanted, int64_t size) { return wanted < 0 || wanted > size ? size : wanted; }
int64_t blocks_in(int64_t size, int64_t block) { return size == 0 ? 0 : (size - 1) / block + 1; }

// Describes t, cut into blocks of [down, across] where -1 is the whole extent. A vector is a matrix of one row.
Blocks blocks_of(const char* op, const Tensor& t, int64_t down, int64_t across) {
  Blocks b{};
  const int64_t last = t.dim() - 1;
  b.matrices = rows_of(op, t, 2);
  b.rows = last > 0 ? t.size(last - 1) : 1;
  b.row_stride = last > 0 ? t.stride(last - 1) : 0;
  b.columns = t.size(last);
  b.block_rows = block_extent(down, b.rows);
  b.block_columns = block_extent(across, b.columns);
  b.down = blocks_in(b.rows, b.block_rows);
  b.across = blocks_in(b.columns, b.block_columns);
  b.strip = std::clamp<int64_t>(1024 / std::max<int64_t>(b.block_columns, 1), 1, Blocks::kMaxStrip);
  b.strips = blocks_in(b.across, b.strip);
  return b;
}

template <typename Args>
void launch(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, Tensor& out) {
  const Blocks& b = args.blocks;
  const int64_t elements = b.matrices.count * b.rows * b.columns;
  cpu::prefer_huge_pages(out.mutable_data_ptr(), elements * int64_t(out.element_size()));
  cpu::parallel(kernel, args, b.matrices.count * b.down * b.strips, b.strip * b.block_rows * b.block_columns * 4);
}

std::vector<int64_t> scale_sizes(const Tensor& t, const Blocks& b) {
  std::vector<int64_t> sizes = sizes_of(t);
  sizes.back() = b.across;
  if (t.dim() > 1) sizes[t.dim() - 2] = b.down;
  return sizes;
}

std::tuple<Tensor, Tensor> quantize(const char* op, const Tensor& x, int64_t down, int64_t across,
                                    std::optional<ScalarType> dtype, bool round_scale,
                                    std::optional<ScalarType> scale_dtype) {
  QuantizeArgs args{};
  args.dtype = float_dtype(op, "x", x);
  const ScalarType code = dtype.value_or(ScalarType::Float8_e4m3fn);
  const ScalarType scale = scale_dtype.value_or(ScalarType::Float);
  args.code = code_of(op, "dtype", code);
  args.scale_is_e8m0 = is_e8m0(op, "scale_dtype", scale);
  args.power_of_two = round_scale || args.scale_is_e8m0;
  const Tensor dense = with_dense_rows(x);
  args.x = dense.const_data_ptr();
  args.blocks = blocks_of(op, dense, down, across);
  Tensor codes = new_tensor(x, sizes_of(x), code);
  Tensor scales = new_tensor(x, scale_sizes(x, args.blocks), scale);
  args.codes = codes.mutable_data_ptr();
  args.scales = scales.mutable_data_ptr();
  launch(cpu::quantize, args, codes);
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_per_token_group(const Tensor& x, int64_t group_size,
                                                    std::optional<ScalarType> dtype, bool round_scale,
                                                    std::optional<ScalarType> scale_dtype) {
  const char* op = "quantize_per_token_group";
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  DI_CHECK(group_size > 0 || group_size == -1, op, ": group_size must be positive, or -1 for the whole row, got ",
           group_size);
  return quantize(op, x, 1, group_size, dtype, round_scale, scale_dtype);
}

void check_block_size(const char* op, const std::vector<int64_t>& size) {
  bool valid = size.size() == 2;
  for (int64_t n : size) valid = valid && (n > 0 || n == -1);
  DI_CHECK(valid, op, ": block_size must be two numbers, positive or -1 for the whole dimension, got ", text_of(size));
}

std::tuple<Tensor, Tensor> quantize_per_block(const Tensor& x, std::vector<int64_t> block_size,
                                              std::optional<ScalarType> dtype, bool round_scale,
                                              std::optional<ScalarType> scale_dtype) {
  const char* op = "quantize_per_block";
  DI_CHECK(x.dim() >= 2, op, ": x must have at least two dimensions");
  check_block_size(op, block_size);
  return quantize(op, x, block_size[0], block_size[1], dtype, round_scale, scale_dtype);
}

Tensor dequantize(const Tensor& q, const Tensor& scales, std::vector<int64_t> block_size,
                  std::optional<ScalarType> dtype) {
  const char* op = "dequantize";
  DequantizeArgs args{};
  DI_CHECK(q.dim() >= 1, op, ": q must have at least one dimension");
  args.code = code_of(op, "q", q.scalar_type());
  args.scale_is_e8m0 = is_e8m0(op, "scales", scales.scalar_type());
  check_block_size(op, block_size);
  check_same_device(op, "scales", scales, q);
  const Tensor dense = with_dense_rows(q);
  args.codes = dense.const_data_ptr();
  args.blocks = blocks_of(op, dense, block_size[0], block_size[1]);
  const std::vector<int64_t> expected = scale_sizes(q, args.blocks);
  DI_CHECK(sizes_of(scales) == expected, op, ": scales must have shape ", text_of(expected), ", got ",
           shape_of(scales));
  Tensor out = new_tensor(q, sizes_of(q), dtype.value_or(ScalarType::BFloat16));
  args.dtype = float_dtype(op, "dtype", out);
  args.out = out.mutable_data_ptr();
  const Tensor dense_scales = torch::stable::contiguous(scales);
  args.scales = dense_scales.const_data_ptr();
  launch(cpu::dequantize, args, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "quantize_per_token_group(Tensor x, int group_size=128, *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None) -> (Tensor, Tensor)");
  m.def(
      "quantize_per_block(Tensor x, int[] block_size=[128, 128], *, ScalarType? dtype=None, bool round_scale=False,"
      " ScalarType? scale_dtype=None) -> (Tensor, Tensor)");
  m.def("dequantize(Tensor q, Tensor scales, int[] block_size, ScalarType? dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("quantize_per_token_group", TORCH_BOX(&quantize_per_token_group));
  m.impl("quantize_per_block", TORCH_BOX(&quantize_per_block));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

}  // namespace deepinfer
