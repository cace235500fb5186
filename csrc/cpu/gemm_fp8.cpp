// Products of e4m3 operands on a CPU start with their values in float32.

#include "gemm_fp8.h"

#include "fp8.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

void widen_e4m3(const WidenArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 128;
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* codes = static_cast<const uint8_t*>(args.codes) + r * args.depth;
    const float* scales = args.scales + r / args.scale_rows * args.scale_row_stride;
    for (int64_t k = 0; k < args.depth; k += kBlock) {
      const F32 scale = splat(scales[k / kBlock * args.scale_depth_stride]);
      const int64_t size = args.depth - k < kBlock ? args.depth - k : kBlock;
      for_lanes(size, [&](int64_t i, int n) {
        U8 lanes{};
        __builtin_memcpy(&lanes, codes + k + i, n);
        store(args.out + r * args.depth + k + i, from_e4m3(lanes) * scale, n);
      });
    }
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
