// What the ops of the rope family hand to the kernels of any device.
#pragma once

#include "norm.h"

namespace deepinfer {

enum class RopeStyle : int { half, interleaved, interleaved_to_half };

// Cosines or sines: one row of columns per position, any strides.
struct RopeTable {
  const void* data;
  Rows groups;             // the row of each group of q or k rows; without positions
  int64_t row_stride;      // of the cache; with positions
  int64_t column_stride;
};

// q or k. Its rows are walked in groups that share one row of the tables, so that a table row is prepared once for all
// heads: row i is row i % rows.count of group i / rows.count.
struct RopeTensor {
  const void* in;
  void* out;  // may be `in`; for interleaved_to_half only where all of a row is read before it is written
  Rows in_groups, in_rows, out_groups, out_rows;
  RopeTable cos, sin;
  Rows position_groups;
  // The elements of each row that are not turned. They follow the others, or have rows of their own if `apart`; the
  // rows of the output have the same strides as those of `out` either way.
  const void* rest;
  void* rest_out;
  int64_t rest_size;
  Rows rest_groups, rest_rows;
};

// An RMSNorm of each row in front of the rotation. Its result has the type of the row.
struct RopeNorm {
  static constexpr int64_t kMostHeadSize = 1024;
  const void* weights[2];  // of q and of k: [head_size] of weight_dtype, dense; null for WeightForm::none
  float eps;
  WeightForm form;
  DType weight_dtype;
};

// Caches that take the rows of k and of v in place of fresh tensors, each row at the slot of its token.
struct RopeCache {
  const void* slots;  // or null
  bool wide_slots;    // int64, else int32
  int64_t length;     // what slots are below; a device writes nothing elsewhere
  Rows slot_groups;   // of the groups of k
  int64_t key_stride;  // of the key cache, from slot to slot
  // v is copied as it is. Dimensions are [batch, tokens, heads], in the cache with slots for tokens.
  const void* values;
  void* value_cache;
  int64_t value_size;  // elements of a row
  int64_t sizes[3], in_strides[3], out_strides[3], slot_strides[2];
};

struct RopeArgs {
  RopeTensor tensors[2];  // q, k; the work items are the rows of both, one after the other, and then those of v
  int64_t rows[3];
  const void* positions;  // or null
  bool wide_positions;    // int64, else int32
  int64_t cache_rows;     // what positions are below
  int64_t head_size, rotary_dim;  // of rows with a rest
  bool apart;                     // the rest lies in front in the outputs, and anywhere in the inputs
  int64_t columns;  // of the tables: rotary_dim or half of it
  float sin_sign;
  bool round_products;  // to the storage type, before the sum
  RopeStyle style;
  DType dtype, table_dtype;
  bool normed;  // by `norm`, which has no meaning else
  RopeNorm norm;
  RopeCache cache;
};

}  // namespace deepinfer
