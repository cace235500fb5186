// The arguments that all quantising ops share: their checks, and the results that they describe.
#pragma once

#include <string>

#include "check.h"
#include "quant.h"

namespace deepinfer {

// dtype, round_scale, scale_dtype and scale_layout of an op, checked.
struct QuantFormat {
  ScalarType codes_dtype, scales_dtype;
  Code code;
  ScaleType scale;
  bool columns_first;  // scale_layout "column"
};

QuantFormat quant_format(const char* op, std::optional<ScalarType> dtype, bool round_scale,
                         std::optional<ScalarType> scale_dtype, const std::string& scale_layout);

Code code_of(const char* op, const char* argument, ScalarType dtype);
ScaleType scale_type_of(const char* op, const char* argument, ScalarType dtype);

inline int64_t block_extent(int64_t wanted, int64_t size) { return wanted < 0 || wanted > size ? size : wanted; }
inline int64_t blocks_in(int64_t size, int64_t block) { return size == 0 ? 0 : (size - 1) / block + 1; }

// Two e2m1 codes share a byte: rows have to be whole pairs, and so have blocks, unless they may be one column wide.
// `block` names the argument.
void check_pairs(const char* op, Code code, const char* block, int64_t block_columns, int64_t columns,
                 bool or_one = false);

// A fresh tensor of codes for elements of shape `sizes`.
Tensor new_codes(const Tensor& like, std::vector<int64_t> sizes, const QuantFormat& format);

// The shape of the scales of a tensor of shape `sizes`, cut into `down` x `across` blocks a matrix. A vector is a
// matrix of one row.
std::vector<int64_t> scale_sizes(std::vector<int64_t> sizes, int64_t down, int64_t across, ScaleType type);

// A fresh tensor of that shape, and in `scales` where they lie.
Tensor new_scales(const char* op, const Tensor& like, const std::vector<int64_t>& sizes, int64_t down, int64_t across,
                  const QuantFormat& format, Scales& scales);

// For an op that quantises its own rows of shape `sizes` in groups of `group_size` (-1: whole rows): checks and
// allocates.
struct QuantizedResult {
  Tensor codes, scales;
  QuantizedRows rows;
};
QuantizedResult new_quantized_rows(const char* op, const Tensor& like, const std::vector<int64_t>& sizes,
                                   int64_t group_size, const QuantFormat& format);

// Quantises rows that a kernel has written, on their device, a GPU or an NPU.
void quantize_rows(const char* op, const Tensor& x, const QuantizedRows& rows);

}  // namespace deepinfer
