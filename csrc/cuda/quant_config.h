// The static facts of the quantisation kernels. Shared by host and device code.
#pragma once

#include "../ops/quant.h"

namespace deepinfer {

// Groups inside rows.
struct QuantizeRowsConfig {
  DType x;
  Code code;
  ScaleType scale;
  int access;   // elements of x that alignment lets one access move
  int lanes;    // threads of a group: a power of two up to 32, or all threads of a block
  int vectors;  // pieces of 16 bytes of a group that a thread holds
  int groups;   // neighbours in a row that a block takes
  int rows;     // of a block
  int longer;   // 1: groups do not fit these, the rest is read twice
  int strided;  // 1: the rows have more than one stride
};

// Blocks of several rows.
struct QuantizeBlocksConfig {
  DType x;
  Code code;
  ScaleType scale;
  int access;
  int lanes;    // pieces of 16 bytes across
  int threads;  // of a quantised block
  int blocks;   // quantised ones of a CUDA block
  int vectors;
  int longer;
  int columns;  // 1: each column has a scale of its own, and what is called a block here is `lanes` pieces of them
};

// Values to codes or back by scales that are there.
struct ScalingConfig {
  DType dtype;
  Code code;
  ScaleType scale;
  int block_columns;  // 0: a row has one scale
  int access;
  int lanes;          // threads of a row, or of a run of one
  int rows;           // of a block
  int vectors;        // pieces of 16 bytes of values
};

}  // namespace deepinfer
