// What an Ascend C kernel is made of: a header under csrc, and the static facts of one instance, by name.
//
//     #include "npu/norm_kernel.h"
//
//     namespace deepinfer::npu {
//     struct Config {
//       static constexpr auto x = DType::bf16;
//       static constexpr auto add = 1;
//     };
//     }  // namespace deepinfer::npu
//
//     extern "C" __global__ __vector__ void rms_norm(GM_ADDR x, GM_ADDR out, deepinfer::npu::RmsNormTiling tiling) {
//       deepinfer::npu::rms_norm<deepinfer::npu::Config>(x, out, tiling);
//     }
#pragma once

#include <string>
#include <vector>

#include "source.h"

namespace deepinfer::jit {

struct AscendSource {
  std::string name;                  // of the function template over the config, and of the entry: "rms_norm"
  std::string header;                // that defines it, under csrc: "npu/norm_kernel.h"
  std::string tiling;                // the type of the last argument, passed by value: "RmsNormTiling"
  std::vector<std::string> buffers;  // the arguments before it, addresses of device memory
  std::vector<Fact> facts;
  bool cube = false;                 // for cube cores, not for vector cores

  std::string text() const;
};

}  // namespace deepinfer::jit
