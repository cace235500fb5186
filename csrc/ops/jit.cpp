// What the tools see of run-time compilation (torch_deepinfer/jit.py). Works without a GPU.

#include <tuple>

#include "../cpu/isa.h"
#include "../jit/build.h"
#include "../jit/cache.h"
#include "../jit/compiler.h"
#include "../jit/cuda_launch.h"
#include "../jit/npu_launch.h"
#include "check.h"

namespace deepinfer {

namespace {

std::string lines_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// (origin, folder of the cache entry or empty, the compiler's warnings)
std::tuple<std::string, std::string, std::string> compile(const std::string& name, const std::string& source,
                                                          const std::string& arch, const std::string& flags) {
  const jit::Built built = jit::build(name, source, arch, flags);
  const char* origin = built.origin == jit::Origin::memory ? "memory"
                       : built.origin == jit::Origin::disk ? "disk"
                                                           : "compiled";
  return {origin, built.binary->path, built.binary->log};
}

// The typical kernels of all families, for CUDA and for NPUs: number, and name and source of each.
template <typename Table>
int64_t count_samples() {
  int64_t count = 0;
  for (const Table* table : Table::all()) count += int64_t(table->sample_sources().size());
  return count;
}

template <typename Table>
std::tuple<std::string, std::string> sample_at(int64_t index) {
  for (const Table* table : Table::all()) {
    const auto sources = table->sample_sources();
    if (index >= 0 && index < int64_t(sources.size())) return {sources[index].name, sources[index].text()};
    index -= int64_t(sources.size());
  }
  fail("_jit_sample: there is no such sample");
}

int64_t sample_count() { return count_samples<jit::KernelTable>(); }
int64_t ascend_sample_count() { return count_samples<jit::AscendTable>(); }
std::tuple<std::string, std::string> sample(int64_t index) { return sample_at<jit::KernelTable>(index); }
std::tuple<std::string, std::string> ascend_sample(int64_t index) { return sample_at<jit::AscendTable>(index); }

// (identity, path)
std::tuple<std::string, std::string> compiler() {
  const auto found = jit::cuda_compiler();
  return {found->identity(), found->path()};
}
std::tuple<std::string, std::string> ascend_compiler() {
  const auto found = jit::ascend_compiler();
  return {found->identity(), found->path()};
}

std::string arch(int64_t capability) { return jit::DeviceFacts::arch_of(int(capability)); }

std::string npu_arch(int64_t device) { return "dav-" + std::to_string(jit::npu_facts(int(device)).arch); }

std::string cache_roots() { return lines_of(jit::Cache::from_environment().roots()); }
int64_t cache_size() { return jit::Cache::from_environment().size_limit(); }
std::string source_root() { return jit::source_root(); }

void add_package_folders(const std::string& lines) {
  jit::add_package_folders(jit::split(lines, '\n'));
}

std::string cpu_isa() {
  switch (cpu::isa()) {
    case cpu::Isa::avx512: return "avx512";
    case cpu::Isa::avx2: return "avx2";
    case cpu::Isa::generic: return "generic";
  }
  return "";
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("_jit_compile(str name, str source, str arch, str flags=\"\") -> (str, str, str)");
  m.def("_jit_sample_count() -> int");
  m.def("_jit_sample(int index) -> (str, str)");
  m.def("_jit_ascend_sample_count() -> int");
  m.def("_jit_ascend_sample(int index) -> (str, str)");
  m.def("_jit_compiler() -> (str, str)");
  m.def("_jit_ascend_compiler() -> (str, str)");
  m.def("_jit_arch(int capability) -> str");
  m.def("_jit_npu_arch(int device) -> str");
  m.def("_jit_cache_roots() -> str");
  m.def("_jit_cache_size() -> int");
  m.def("_jit_source_root() -> str");
  m.def("_jit_add_package_folders(str lines) -> ()");
  m.def("_cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CompositeExplicitAutograd, m) {
  m.impl("_jit_compile", TORCH_BOX(&compile));
  m.impl("_jit_sample_count", TORCH_BOX(&sample_count));
  m.impl("_jit_sample", TORCH_BOX(&sample));
  m.impl("_jit_ascend_sample_count", TORCH_BOX(&ascend_sample_count));
  m.impl("_jit_ascend_sample", TORCH_BOX(&ascend_sample));
  m.impl("_jit_compiler", TORCH_BOX(&compiler));
  m.impl("_jit_ascend_compiler", TORCH_BOX(&ascend_compiler));
  m.impl("_jit_arch", TORCH_BOX(&arch));
  m.impl("_jit_npu_arch", TORCH_BOX(&npu_arch));
  m.impl("_jit_cache_roots", TORCH_BOX(&cache_roots));
  m.impl("_jit_cache_size", TORCH_BOX(&cache_size));
  m.impl("_jit_source_root", TORCH_BOX(&source_root));
  m.impl("_jit_add_package_folders", TORCH_BOX(&add_package_folders));
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa));
}

}  // namespace deepinfer
