#pragma once

#include "chip.h"
#include "gemm_tiling.h"

namespace deepinfer::npu {

// Tiles such that all cores have work and none waits for memory longer than it must. The bits of the result do not depend
// on them: sums run along the depth in order.
GemmTiling tile_gemm(const MatmulArgs& args, const Chip& chip);
int64_t blocks_of(const GemmTiling& tiling, const Chip& chip);

// Whether k is the dense dimension of the operand.
inline bool a_is_dense(const MatmulArgs& args) { return args.depth == 1 || args.x_depth_stride == 1; }
inline bool b_is_dense(const MatmulArgs& args) { return args.depth_stride == 1; }

GemmFinishTiling tile_gemm_finish(const MatmulArgs& args, const Chip& chip);
int64_t blocks_of(const GemmFinishTiling& tiling, const Chip& chip);

// Whether vector cores have to finish what cube cores sum, or to make all of it where there is nothing to sum.
bool needs_finish(const MatmulArgs& args);

}  // namespace deepinfer::npu
