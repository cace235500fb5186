// What tilings may ask of an NPU.
#pragma once

#include <cstdint>

namespace deepinfer::npu {

struct Chip {
  int cores = 0;             // vector cores
  int64_t buffer_bytes = 0;  // of a core's unified buffer, that kernels may use
  int cube_cores = 0;        // that multiply matrices
  int64_t sum_bytes = 0;     // of a cube core's L0C
};

// Of the public figures: 910B has 192 KB, of which 256 bytes and 8 KB are reserved; 950 has 256 KB, 8 KB of them reserved.
constexpr int64_t buffer_bytes(int arch) { return arch == 3510 ? 248 * 1024 : (192 - 8) * 1024 - 256; }

// L0C is what differs between the memories of cube cores: L1 has 512 KB, L0A and L0B 64 KB each.
constexpr int64_t sum_bytes(int arch) { return arch == 3510 ? 256 * 1024 : 128 * 1024; }

// Of an NPU of this machine. Throws std::runtime_error: no CANN, or a chip that there are no kernels for.
Chip chip_of(int device);

}  // namespace deepinfer::npu
