// The static facts of a norm kernel. Shared by host and device code.
#pragma once

#include "../ops/norm.h"

namespace deepinfer {

// A thread holds `vectors` pieces of 16 bytes of x. Which elements a thread adds up depends on the hidden size and the
// dtype only: a row's result does not depend on how many rows there are, nor on strides and alignment.
struct RmsNormConfig {
  DType x, weight, out;
  WeightForm form;
  int add;      // 1: the residual is added, and the sum written
  int access;   // elements that alignment lets one access move
  int lanes;    // threads of a row: a power of two up to 32, or all threads of a block
  int rows;     // of a block
  int vectors;  // held in registers, by each thread
  int longer;   // 1: rows do not fit these, the rest is read twice
  int strided;  // 1: the rows have more than one stride
  int group_lanes;  // threads of a group that shares a scale, within a warp unless it is the row; 0: no quantisation
  int row_scale;    // 1: that group is the row
  Code code;
  ScaleType scale;
};

}  // namespace deepinfer
