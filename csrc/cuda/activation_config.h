// The static facts of an activation kernel. Shared by host and device code.
#pragma once

#include "../ops/activation.h"

namespace deepinfer {

struct GatedConfig {
  DType x;
  Gated form;
  int limited;      // 1: gate and up are clamped
  int weighted;     // 1: rows have weights
  int interleaved;  // 1: gate and up alternate in one tensor
  int access;       // elements of gate and up that alignment lets one access move
  int lanes;        // threads of a row, or of a run of one
  int rows;         // of a block
  int vectors;      // pieces of 16 bytes that a thread loads at once, of gate and of up
  int strided;      // 1: the rows have more than one stride
};

struct GatedQuantConfig {
  DType x;
  Gated form;
  int limited, weighted, interleaved;
  int mapped;   // 1: a map names the slot of each row, or none
  Code code;
  ScaleType scale;
  int access;   // as above
  int lanes;    // threads of a group: a power of two up to 32, or all threads of a block
  int vectors;  // pieces of 16 bytes of a group that a thread loads at once, of gate and of up
  int groups;   // neighbours in a row that a block takes
  int rows;     // of a block
  int longer;   // 1: groups do not fit these, the rest is computed twice
  int strided;
};

}  // namespace deepinfer
