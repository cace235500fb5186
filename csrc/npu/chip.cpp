#include "chip.h"

#include "../jit/npu_launch.h"

namespace deepinfer::npu {

Chip chip_of(int device) {
  const jit::NpuFacts& facts = jit::npu_facts(device);
  return {facts.cores, buffer_bytes(facts.arch), facts.cube_cores, sum_bytes(facts.arch)};
}

}  // namespace deepinfer::npu
