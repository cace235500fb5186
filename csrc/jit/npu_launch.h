// Kernels on an Ascend NPU: loading on first use, and launching on torch's current stream. As cuda_launch.h:
//
//     jit::AscendSource describe(const RmsNormConfig& config);
//     std::vector<RmsNormConfig> samples();
//     jit::AscendKernels<RmsNormConfig> kernels(describe, samples);
//
//     kernels.launch(device, config, blocks, {x, out}, tiling);
#pragma once

#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "acl.h"
#include "ascend_source.h"

namespace deepinfer::jit {

// What a tiling may depend on.
struct NpuFacts {
  int arch = 0;        // 2201 or 3510
  int cores = 0;       // vector cores
  int cube_cores = 0;  // of matrices
};

// Facts of an NPU, read once. Throws std::runtime_error: no CANN, or a chip that there are no kernels for.
const NpuFacts& npu_facts(int device);

class AscendTable {
 public:
  AscendTable();
  AscendTable(const AscendTable&) = delete;
  AscendTable& operator=(const AscendTable&) = delete;

  // All tables of the library, for tools.
  static const std::vector<AscendTable*>& all();
  virtual std::vector<AscendSource> sample_sources() const = 0;

 protected:
  virtual AscendSource source_of(const void* config) const = 0;
  void launch(int device, const void* config, size_t config_bytes, uint32_t blocks,
              std::initializer_list<const void*> buffers, const void* tiling, size_t tiling_bytes);

 private:
  acl::Function load(int device, const void* config);

  std::mutex mutex_;
  std::map<std::pair<int, std::string>, acl::Function> functions_;  // by device and config
};

template <typename Config>
class AscendKernels final : public AscendTable {
  static_assert(std::is_empty_v<Config> || std::has_unique_object_representations_v<Config>,
                "configs are compared as bytes");

 public:
  AscendKernels(AscendSource (*describe)(const Config&), std::vector<Config> (*samples)())
      : describe_(describe), samples_(samples) {}

  // Does nothing for no blocks. Throws std::runtime_error when the kernel cannot be compiled, loaded or launched.
  template <typename Tiling>
  void launch(int device, const Config& config, int64_t blocks, std::initializer_list<const void*> buffers,
              const Tiling& tiling) {
    static_assert(std::is_trivially_copyable_v<Tiling> && alignof(Tiling) == 8);
    AscendTable::launch(device, &config, sizeof(Config), uint32_t(blocks), buffers, &tiling, sizeof(Tiling));
  }

  std::vector<AscendSource> sample_sources() const override {
    std::vector<AscendSource> sources;
    for (const Config& config : samples_()) sources.push_back(describe_(config));
    return sources;
  }

 private:
  AscendSource source_of(const void* config) const override { return describe_(*static_cast<const Config*>(config)); }

  AscendSource (*describe_)(const Config&);
  std::vector<Config> (*samples_)();
};

}  // namespace deepinfer::jit
