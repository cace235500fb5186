// What a kernel is made of: a header under csrc, and the static facts of one instance, by name.
//
// The facts become a short source file that a person can read and compile by hand:
//
//     #include "cuda/norm.cuh"
//
//     namespace deepinfer {
//     constexpr RmsNormConfig config{
//         .x = DType::bf16,
//         .threads = 128,
//     };
//     }  // namespace deepinfer
//
//     extern "C" __global__ void __launch_bounds__(128) rms_norm(const __grid_constant__ deepinfer::RmsNormArgs args) {
//       deepinfer::rms_norm<deepinfer::config>(args);
//     }
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../cpu/types.h"

namespace deepinfer::jit {

// One static fact. Enumerators are given by their own name, "WeightForm::cast_mul".
struct Fact {
  Fact(const char* name, std::string value) : name(name), value(std::move(value)) {}
  Fact(const char* name, const char* value) : name(name), value(value) {}
  Fact(const char* name, int value) : name(name), value(std::to_string(value)) {}
  Fact(const char* name, DType value);

  std::string name, value;
};

struct KernelSource {
  std::string name;         // of the device function template over the config, and of the entry: "rms_norm"
  std::string header;       // that defines it, under csrc: "cuda/norm.cuh"
  std::string config;       // the type of the static facts, a struct of int-sized members: "RmsNormConfig"
  std::string args;         // the type of the one kernel argument, passed by value: "RmsNormArgs"
  std::vector<Fact> facts;  // every member of the config, in order
  int threads = 0;          // of a block
  int blocks_per_sm = 0;    // the least that must fit, a limit on registers; 0: no limit
  int cluster = 1;          // blocks of a cluster, along x
  int shared_bytes = 0;     // dynamic shared memory of a block
  bool pdl = false;         // may start while the kernel before it drains; it has to call wait_for_previous_kernel()

  std::string text() const;
};

// The folder that holds the kernel headers: csrc beside the library, or DEEPINFER_SOURCE_DIR.
const std::string& source_root();

// The digest of everything that `text` includes with quotes, directly or not, by name and content. `files` receives
// the names. Throws std::runtime_error when a file is missing.
std::string digest_of_includes(const std::string& text, std::vector<std::string>& files);

}  // namespace deepinfer::jit
