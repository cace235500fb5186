// Kernels on a device: loading on first use, and launching on torch's current stream at the cost of a table look-up.
//
// A family's host file holds one table for each of its kernels:
//
//     jit::KernelSource describe(const RmsNormConfig& config);     // the config, by name
//     std::vector<RmsNormConfig> samples();                        // typical ones, for warm-up and for CI
//     jit::Kernels<RmsNormConfig> kernels(describe, samples);
//
//     kernels.launch(device, config, {blocks}, args);
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <type_traits>
#include <stdexcept>
#include <vector>

#include "cuda_driver.h"
#include "source.h"

namespace deepinfer::jit {

// What a kernel's plan may depend on.
struct DeviceFacts {
  int index = 0;
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;
  int l2_bytes = 0;
  cu::Context context = nullptr;  // the primary one, which torch uses

  std::string arch() const { return arch_of(capability); }
  // "sm_90a" for 90: the features of that very chip where there are some, else the plain architecture.
  static std::string arch_of(int capability);
};

// Facts of a CUDA device, read once. Throws std::runtime_error: no driver, or a process forked after CUDA was used.
const DeviceFacts& device_facts(int device);

// The stream that torch works on now.
cu::Stream current_stream(int device);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

// The kernels of one call site, by device and config. Look-ups take no lock.
class KernelTable {
 public:
  KernelTable();
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  // All tables of the library, for tools.
  static const std::vector<KernelTable*>& all();
  virtual std::vector<KernelSource> sample_sources() const = 0;

 protected:
  virtual KernelSource source_of(const void* config) const = 0;
  // Compiles or loads the kernel unless it is there, and launches it.
  void launch(int device, const void* config, size_t config_bytes, Grid grid, const void* args);

 private:
  struct Entry;
  const Entry& load(int device, const void* config, size_t config_bytes, std::atomic<Entry*>& bucket);

  static constexpr size_t kBuckets = 32;
  std::atomic<Entry*> buckets_[kBuckets] = {};
};

template <typename Config>
class Kernels final : public KernelTable {
  // Configs are compared as bytes, and their members counted against the facts that are printed.
  static_assert(std::has_unique_object_representations_v<Config> && sizeof(Config) % sizeof(int) == 0,
                "a config is a struct of int-sized members");

 public:
  Kernels(KernelSource (*describe)(const Config&), std::vector<Config> (*samples)())
      : describe_(describe), samples_(samples) {}

  // Does nothing for an empty grid. Throws std::runtime_error when the kernel cannot be compiled, loaded or launched.
  template <typename Args>
  void launch(int device, const Config& config, Grid grid, const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>);
    KernelTable::launch(device, &config, sizeof(Config), grid, &args);
  }

  std::vector<KernelSource> sample_sources() const override {
    std::vector<KernelSource> sources;
    for (const Config& config : samples_()) sources.push_back(source_of(&config));
    return sources;
  }

 private:
  KernelSource source_of(const void* config) const override {
    KernelSource source = describe_(*static_cast<const Config*>(config));
    check_facts(source, sizeof(Config) / sizeof(int));
    return source;
  }
  static void check_facts(const KernelSource& source, size_t members) {
    if (source.facts.size() != members)
      throw std::logic_error(source.name + ": the description of the config leaves members out");
  }

  KernelSource (*describe_)(const Config&);
  std::vector<Config> (*samples_)();
};

}  // namespace deepinfer::jit
