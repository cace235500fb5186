#include "cuda_launch.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstring>
#include <mutex>
#include <stdexcept>

#include "build.h"

namespace deepinfer::jit {

namespace {

constexpr int kMaxDevices = 64;
constexpr int kPortableCluster = 8;

std::mutex mutex;  // for loading; launches of loaded kernels take none
std::atomic<const DeviceFacts*> known_devices[kMaxDevices];

bool cuda_used = false;
std::atomic<bool> forked_after_use = false;
[[maybe_unused]] const int registered =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] {
                     mutex.unlock();
                     forked_after_use = cuda_used;
                   });

[[noreturn]] void throw_forked() {
  throw std::runtime_error(
      "this process was forked from one that had used CUDA, which CUDA does not survive; start workers with the spawn "
      "method, or fork before the first CUDA call");
}

const DeviceFacts* read_device(int index) {
  const cu::Driver& driver = cu::driver();
  auto facts = std::make_unique<DeviceFacts>();
  facts->index = index;
  auto attribute = [&](cu::DeviceAttribute id) {
    int value = 0;
    cu::check(driver.device_get_attribute(&value, id, index), "CUDA device " + std::to_string(index));
    return value;
  };
  const cu::Result result = driver.device_primary_context_retain(&facts->context, index);
  if (result == cu::kNotInitialized) throw_forked();  // torch has initialised the driver, though not in this process
  cu::check(result, "CUDA device " + std::to_string(index));
  facts->capability = attribute(cu::kCapabilityMajor) * 10 + attribute(cu::kCapabilityMinor);
  facts->multiprocessors = attribute(cu::kMultiprocessorCount);
  facts->shared_bytes_per_block = attribute(cu::kSharedMemoryPerBlock);
  facts->l2_bytes = attribute(cu::kL2CacheSize);
  return facts.release();  // lives as long as the process, like the context
}

using StreamGetter = int32_t (*)(int32_t, void**);

StreamGetter find_stream_getter() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* symbol = dlsym(RTLD_DEFAULT, kName);
  if (!symbol)
    if (void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) symbol = dlsym(library, kName);
  if (!symbol) throw std::runtime_error("torch was built without CUDA: it has no current CUDA stream");
  return reinterpret_cast<StreamGetter>(symbol);
}

std::vector<KernelTable*>& tables() {
  static std::vector<KernelTable*> list;
  return list;
}

}  // namespace

std::string DeviceFacts::arch_of(int capability) {
  const bool has_own_features = capability == 90 || capability == 100 || capability == 103;
  return "sm_" + std::to_string(capability) + (has_own_features ? "a" : "");
}

const DeviceFacts& device_facts(int device) {
  if (forked_after_use.load(std::memory_order_relaxed)) throw_forked();
  if (device < 0 || device >= kMaxDevices) throw std::out_of_range("CUDA device " + std::to_string(device));
  if (const DeviceFacts* known = known_devices[device].load(std::memory_order_acquire)) return *known;
  std::lock_guard lock(mutex);
  if (const DeviceFacts* known = known_devices[device].load()) return *known;
  cuda_used = true;
  const DeviceFacts* facts = read_device(device);
  known_devices[device].store(facts, std::memory_order_release);
  return *facts;
}

cu::Stream current_stream(int device) {
  static const StreamGetter getter = find_stream_getter();
  void* stream = nullptr;
  if (getter(device, &stream) != 0)
    throw std::runtime_error("torch has no current stream for CUDA device " + std::to_string(device));
  return static_cast<cu::Stream>(stream);
}

// A loaded kernel. Entries are only ever added, so a reader needs no lock.
struct KernelTable::Entry {
  int device;
  std::vector<char> config;
  KernelSource source;
  bool pdl;
  cu::Context context;
  cu::Function function;
  Entry* next;
};

KernelTable::KernelTable() { tables().push_back(this); }

const std::vector<KernelTable*>& KernelTable::all() { return tables(); }

void KernelTable::launch(int device, const void* config, size_t config_bytes, Grid grid, const void* args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (forked_after_use.load(std::memory_order_relaxed)) throw_forked();

  uint64_t hash = uint64_t(device);
  for (size_t i = 0; i < config_bytes; i += sizeof(int)) {
    int member;
    std::memcpy(&member, static_cast<const char*>(config) + i, sizeof(int));
    hash = (hash ^ uint32_t(member)) * 0x9e3779b97f4a7c15u;
  }
  std::atomic<Entry*>& bucket = buckets_[(hash >> 32) % kBuckets];
  const Entry* entry = bucket.load(std::memory_order_acquire);
  while (entry && (entry->device != device || std::memcmp(entry->config.data(), config, config_bytes) != 0))
    entry = entry->next;
  if (!entry) entry = &load(device, config, config_bytes, bucket);

  const KernelSource& kernel = entry->source;
  const cu::Driver& driver = cu::driver();
  cu::LaunchAttribute attributes[2];
  unsigned count = 0;
  if (kernel.cluster > 1) {
    attributes[count].id = cu::kClusterDimension;
    attributes[count++].value.cluster = {unsigned(kernel.cluster), 1, 1};
  }
  if (entry->pdl) {
    attributes[count].id = cu::kProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  const cu::LaunchConfig launch = {grid.x, grid.y, grid.z, unsigned(kernel.threads), 1, 1,
                                   unsigned(kernel.shared_bytes), current_stream(device), attributes, count};
  void* arguments[] = {const_cast<void*>(args)};
  cu::ContextScope scope(driver, entry->context);
  if (cu::Result result = driver.launch_kernel(&launch, entry->function, arguments, nullptr))
    cu::check(result, "launching " + kernel.name + " on " + std::to_string(grid.x) + "x" + std::to_string(grid.y) +
                          "x" + std::to_string(grid.z) + " blocks of " + std::to_string(kernel.threads) + " threads");
}

const KernelTable::Entry& KernelTable::load(int device, const void* config, size_t config_bytes,
                                            std::atomic<Entry*>& bucket) {
  const DeviceFacts& facts = device_facts(device);
  const cu::Driver& driver = cu::driver();
  auto entry = std::make_unique<Entry>();
  entry->device = device;
  const char* bytes = static_cast<const char*>(config);
  entry->config.assign(bytes, bytes + config_bytes);
  entry->source = source_of(config);
  entry->context = facts.context;
  const KernelSource& kernel = entry->source;
  entry->pdl = kernel.pdl && facts.capability >= 90;
  cu::ContextScope scope(driver, facts.context);

  int capturing = 0;
  cu::check(driver.stream_is_capturing(current_stream(device), &capturing), kernel.name);
  if (capturing)
    throw std::runtime_error(
        kernel.name +
        " is used for the first time while a CUDA graph is being captured, where nothing can be compiled or loaded; "
        "run the same call once before the capture to warm up");

  const Built built = build(kernel.name, kernel.text(), facts.arch());

  std::lock_guard lock(mutex);
  for (const Entry* other = bucket.load(); other; other = other->next)
    if (other->device == device && other->config == entry->config) return *other;
  cu::Module module;  // kept for the life of the process
  cu::check(driver.module_load_data(&module, built.binary->bytes.data()), "loading " + kernel.name);
  cu::check(driver.module_get_function(&entry->function, module, kernel.name.c_str()), "loading " + kernel.name);
  if (kernel.shared_bytes > 0)  // dynamic and static bytes together may exceed what a block gets without asking
    cu::check(driver.function_set_attribute(entry->function, cu::kMaxDynamicSharedBytes, kernel.shared_bytes),
              kernel.name + " with " + std::to_string(kernel.shared_bytes) + " bytes of shared memory");
  if (kernel.cluster > kPortableCluster)
    cu::check(driver.function_set_attribute(entry->function, cu::kNonPortableClusterAllowed, 1),
              kernel.name + " with clusters of " + std::to_string(kernel.cluster));
  entry->next = bucket.load();
  bucket.store(entry.get(), std::memory_order_release);
  return *entry.release();
}

}  // namespace deepinfer::jit
