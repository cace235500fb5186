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
  int items;    // groups that a thread works on, `groups` apart
  int groups;   // neighbours in a row that a block takes, at each of them
  int rows;     // of a block
  int longer;   // 1: groups do not fit these, the rest is read twice
  int strided;  // 1: the rows have more than one stride
};

// Blocks of several rows. A CUDA block takes `tiles` tiles; a tile is as high as a block, and one or more blocks wide.
struct QuantizeBlocksConfig {
  DType x;
  Code code;
  ScaleType scale;
  int access;
  int lanes;    // pieces of 16 bytes across a tile
  int beside;   // blocks across a tile; 0: each column is a block
  int threads;  // of a tile: a multiple of 32
  int tiles;    // more than one have a warp each
  int vectors;
  int longer;
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
  int vectors;        // pieces of 16 bytes of values, of a thread
  int down;           // 1: these lie below each other, in rows of one band
};

}  // namespace deepinfer
