#include "npu_launch.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "build.h"

namespace deepinfer::jit {

namespace {

int arch_of_soc(const std::string& soc) {
  if (soc.starts_with("Ascend950")) return 3510;
  if (soc.starts_with("Ascend910B") || soc.starts_with("Ascend910_93")) return 2201;
  return 0;
}

NpuFacts read_facts(int device) {
  const acl::Runtime& runtime = acl::runtime();
  NpuFacts facts;
  const auto attribute = [&](acl::DeviceAttribute id) {
    int64_t value = 0;
    acl::check(runtime.get_device_info(uint32_t(device), id, &value), "NPU " + std::to_string(device));
    return int(value);
  };
  const char* name = runtime.get_soc_name();
  const std::string soc = name ? name : "";
  facts.arch = arch_of_soc(soc);
  if (facts.arch == 0)
    throw std::runtime_error("torch_deepinfer has kernels for Ascend 910B, 910_93 and 950, not for " + soc);
  facts.cores = attribute(acl::kVectorCores);
  facts.cube_cores = attribute(acl::kCubeCores);
  if (facts.cores < 1 || facts.cube_cores < 1)
    throw std::runtime_error("NPU " + std::to_string(device) + " has no vector or no cube cores");
  return facts;
}

using StreamGetter = int32_t (*)(int32_t, void**);

// torch_npu's own C function. It waits until the operators that torch_npu still holds in a queue of the host are on the
// stream, so that what is launched now comes after them.
StreamGetter find_stream_getter() {
  constexpr const char* kName = "aoti_torch_get_current_npu_stream";
  void* symbol = dlsym(RTLD_DEFAULT, kName);
  if (!symbol)
    if (void* library = dlopen("libtorch_npu.so", RTLD_NOW | RTLD_NOLOAD)) symbol = dlsym(library, kName);
  if (!symbol) throw std::runtime_error(std::string("torch_npu is not loaded, or has no ") + kName);
  return reinterpret_cast<StreamGetter>(symbol);
}

acl::Stream current_stream(int device) {
  static const StreamGetter getter = find_stream_getter();
  void* stream = nullptr;
  if (getter(device, &stream) != 0)
    throw std::runtime_error("torch has no current stream for NPU " + std::to_string(device));
  return stream;
}

std::vector<AscendTable*>& tables() {
  static std::vector<AscendTable*> list;
  return list;
}

}  // namespace

const NpuFacts& npu_facts(int device) {
  static std::mutex mutex;
  static std::map<int, NpuFacts> known;
  std::lock_guard lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, read_facts(device)).first->second;
}

AscendTable::AscendTable() { tables().push_back(this); }

const std::vector<AscendTable*>& AscendTable::all() { return tables(); }

void AscendTable::launch(int device, const void* config, size_t config_bytes, uint32_t blocks,
                         std::initializer_list<const void*> buffers, const void* tiling, size_t tiling_bytes) {
  if (blocks == 0) return;
  const acl::DeviceScope scope(device);
  acl::Function function;
  {
    std::lock_guard lock(mutex_);
    acl::Function& known = functions_[{device, std::string(static_cast<const char*>(config), config_bytes)}];
    if (!known) known = load(device, config);
    function = known;
  }
  std::vector<char> arguments;
  const auto append = [&](const void* data, size_t bytes) {
    arguments.insert(arguments.end(), static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
  };
  for (const void* buffer : buffers) append(&buffer, sizeof(buffer));
  append(tiling, tiling_bytes);
  acl::check(acl::runtime().launch(function, blocks, current_stream(device), nullptr, arguments.data(),
                                   arguments.size(), nullptr, 0),
             "launching " + source_of(config).name + " on " + std::to_string(blocks) + " cores");
}

acl::Function AscendTable::load(int device, const void* config) {
  const AscendSource source = source_of(config);
  const Built built = build(source.name, source.text(), "dav-" + std::to_string(npu_facts(device).arch));
  const auto cores = source.cube ? acl::LoadOption::kCubeCore : acl::LoadOption::kVectorCore;
  acl::LoadOption option{acl::LoadOption::kMagic, {cores}};
  const acl::LoadOptions options{&option, 1};
  acl::Binary binary;  // kept for the life of the process
  acl::check(acl::runtime().binary_load(built.binary->bytes.data(), built.binary->bytes.size(), &options, &binary),
             "loading " + source.name);
  acl::Function function;
  acl::check(acl::runtime().binary_get_function(binary, source.name.c_str(), &function), "loading " + source.name);
  return function;
}

}  // namespace deepinfer::jit
