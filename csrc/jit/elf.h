// What an Ascend object says of itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deepinfer::jit {

// The kernels that a 64-bit ELF file holds, by its sections .ascend.meta.<kernel>, without the suffix that marks the
// half of a kernel for one kind of core. Empty if it is no such file.
std::vector<std::string> kernels_of_elf(std::string_view file);

}  // namespace deepinfer::jit
