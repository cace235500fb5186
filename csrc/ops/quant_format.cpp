#include "quant_format.h"

#include <algorithm>
#include <limits>

#include "../cuda/quant.h"
#include "../npu/quant.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr int64_t kPitchBytes = 16;  // what bulk copies ask of the stride between columns
constexpr int64_t kMostScales = std::numeric_limits<uint32_t>::max();  // of a matrix across, and in all of them down

Tensor new_strided(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                   ScalarType dtype) {
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                         shim_dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

}  // namespace

Code code_of(const char* op, const char* argument, ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return Code::e4m3;
  if (dtype == ScalarType::Char) return Code::int8;
  if (dtype == ScalarType::Float4_e2m1fn_x2) return Code::e2m1;
  fail(op, ": ", argument, " must be float8_e4m3fn, int8 or float4_e2m1fn_x2, got ", name_of(dtype));
}

ScaleType scale_type_of(const char* op, const char* argument, ScalarType dtype) {
  if (dtype == ScalarType::Float) return ScaleType::f32;
  if (dtype == ScalarType::Float8_e8m0fnu) return ScaleType::e8m0;
  if (dtype == ScalarType::Int) return ScaleType::packed;
  fail(op, ": ", argument, " must be float32, float8_e8m0fnu or int32, got ", name_of(dtype));
}

QuantFormat quant_format(const char* op, std::optional<ScalarType> dtype, bool round_scale,
                         std::optional<ScalarType> scale_dtype, const std::string& scale_layout) {
  QuantFormat format{};
  format.codes_dtype = dtype.value_or(ScalarType::Float8_e4m3fn);
  format.scales_dtype = scale_dtype.value_or(ScalarType::Float);
  format.code = code_of(op, "dtype", format.codes_dtype);
  format.scale = scale_type_of(op, "scale_dtype", format.scales_dtype);
  if (round_scale && format.scale == ScaleType::f32) format.scale = ScaleType::power;
  DI_CHECK(scale_layout == "row" || scale_layout == "column", op, ": scale_layout must be row or column, got ",
           scale_layout);
  format.columns_first = scale_layout == "column";
  return format;
}

void check_pairs(const char* op, Code code, const char* block, int64_t block_columns, int64_t columns, bool or_one) {
  if (code != Code::e2m1) return;
  DI_CHECK(columns % 2 == 0, op, ": the last dimension of x must be even with float4_e2m1fn_x2, got ", columns);
  DI_CHECK((or_one && block_columns == 1) || block_columns % 2 == 0 || block_extent(block_columns, columns) == columns,
           op, ": ", block, " must be even", or_one ? " or 1" : "", " with float4_e2m1fn_x2, got ", block_columns);
}

Tensor new_codes(const Tensor& like, std::vector<int64_t> sizes, const QuantFormat& format) {
  if (format.code == Code::e2m1) sizes.back() /= 2;
  return new_tensor(like, sizes, format.codes_dtype);
}

std::vector<int64_t> scale_sizes(std::vector<int64_t> sizes, int64_t down, int64_t across, ScaleType type) {
  sizes.back() = type == ScaleType::packed ? (across + 3) / 4 : across;
  if (sizes.size() > 1) sizes[sizes.size() - 2] = down;
  return sizes;
}

Tensor new_scales(const char* op, const Tensor& like, const std::vector<int64_t>& sizes, int64_t down, int64_t across,
                  const QuantFormat& format, Scales& scales) {
  const std::vector<int64_t> shape = scale_sizes(sizes, down, across, format.scale);
  const int64_t columns = shape.back();
  int64_t matrices = 1;
  for (size_t d = 0; d + 2 < shape.size(); ++d) matrices *= shape[d];
  DI_CHECK(matrices * down < kMostScales && columns < kMostScales, op, ": ", matrices * down, " x ", columns,
           " scales are more than their strides can hold");
  scales = {.data = nullptr, .rows = down, .matrix = down * columns, .row = uint32_t(columns), .column = 1,
            .across = across, .type = format.scale};
  Tensor tensor = [&] {
    if (!format.columns_first) {
      scales.rows = matrices * down;
      return new_tensor(like, shape, format.scales_dtype);
    }
    const int64_t unit = kPitchBytes / (format.scale == ScaleType::e8m0 ? 1 : 4);
    const int64_t pitch = (std::max<int64_t>(down, 1) + unit - 1) / unit * unit;
    scales.matrix = columns * pitch;
    scales.row = 1;
    scales.column = uint32_t(pitch);
    std::vector<int64_t> strides(shape.size());
    int64_t stride = std::max<int64_t>(columns, 1) * pitch;
    for (size_t d = shape.size(); d-- > 0;) {
      if (d + 1 == shape.size()) {
        strides[d] = pitch;
      } else if (d + 2 == shape.size()) {
        strides[d] = 1;
      } else {
        strides[d] = stride;
        stride *= std::max<int64_t>(shape[d], 1);
      }
    }
    return new_strided(like, shape, strides, format.scales_dtype);
  }();
  scales.data = tensor.mutable_data_ptr();
  return tensor;
}

QuantizedResult new_quantized_rows(const char* op, const Tensor& like, const std::vector<int64_t>& sizes,
                                   int64_t group_size, const QuantFormat& format) {
  DI_CHECK(group_size > 0 || group_size == -1, op, ": group_size must be positive, or -1 for the whole row, got ",
           group_size);
  const int64_t columns = sizes.back();
  check_pairs(op, format.code, "group_size", group_size, columns);
  QuantizedRows rows{};
  rows.code = format.code;
  rows.group = block_extent(group_size, columns);
  const int64_t down = sizes.size() > 1 ? sizes[sizes.size() - 2] : 1;
  Tensor codes = new_codes(like, sizes, format);
  Tensor scales = new_scales(op, like, sizes, down, blocks_in(columns, rows.group), format, rows.scales);
  rows.codes = codes.mutable_data_ptr();
  return {codes, scales, rows};
}

void quantize_rows(const char* op, const Tensor& x, const QuantizedRows& rows) {
  QuantizeArgs args{};
  args.x = x.const_data_ptr();
  args.codes = rows.codes;
  args.scales = rows.scales;
  args.dtype = float_dtype(op, "x", x);
  args.code = rows.code;
  Blocks& blocks = args.blocks;
  blocks.matrices = rows_of(op, x);
  blocks.rows = blocks.block_rows = blocks.down = 1;
  blocks.columns = x.size(x.dim() - 1);
  blocks.block_columns = rows.group;
  blocks.across = rows.scales.across;
  if (x.is_cuda()) cuda::quantize(args, x.get_device_index());
  else npu::quantize(args, x.get_device_index());
}

}  // namespace deepinfer
