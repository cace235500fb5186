// The calls of the Ascend runtime that torch_npu and the library make, on the stand-in device.

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../twin/machine.h"
#include "device.h"

using namespace standin;

#define ACL extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDevices = 2;
thread_local int current_device = -1;

int copy_now(void* to, size_t room, const void* from, size_t bytes) {
  if (bytes > room) return report(kInvalid, "a copy of more bytes than the destination has");
  std::memmove(memory_at(to), memory_at(from), bytes);
  return kOk;
}

// Few, unless a chip's own number is wanted, so that tests see them share the work.
int vector_cores() {
  const char* given = std::getenv("DEEPINFER_STANDIN_CORES");
  return given ? std::atoi(given) : 8;
}

Stream* stream_of(void* handle) { return static_cast<Stream*>(handle); }

}  // namespace

ACL int aclInit(const char*) {
  std::fprintf(stderr,
               "[stand-in] There is no NPU here. This is the runtime of torch_deepinfer's own tests: NPU kernels run on "
               "a host model of %s, timings mean nothing.\n",
               soc_name());
  return kOk;
}
ACL int aclFinalize() { return kOk; }
ACL const char* aclGetRecentErrMsg() { return recent_message(); }
ACL const char* aclrtGetSocName() { return soc_name(); }

ACL int aclrtGetDeviceCount(uint32_t* count) { return *count = kDevices, kOk; }
ACL int aclrtSetDevice(int device) {
  if (device < 0 || device >= kDevices) return report(kInvalid, "there is no such device");
  current_device = device;
  return kOk;
}
ACL int aclrtGetDevice(int* device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return kOk;
}
ACL int aclrtResetDevice(int) { return synchronize_all(); }
ACL int aclrtGetCurrentContext(void** context) { return *context = &current_device, kOk; }
ACL int aclrtSetCurrentContext(void*) { return kOk; }
ACL int aclrtGetPrimaryCtxState(int, uint32_t* flags, int* active) {
  if (flags) *flags = 0;
  *active = current_device >= 0;
  return kOk;
}
ACL int aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
  switch (attribute) {
    case 101:
    case 102: return *value = vector_cores() / 2, kOk;
    case 201: return *value = vector_cores(), kOk;
    case 301: return *value = int64_t(8) << 30, kOk;
    case 302: return *value = int64_t(64) << 20, kOk;
    case 501: return *value = 0, kOk;
    case 601: return *value = arch_number(), kOk;
    default: return report(kNotSupported, "an attribute that is not modelled");
  }
}
ACL int aclrtGetDeviceCapability(uint32_t, int, int32_t* value) { return *value = 0, kOk; }
ACL int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total) {
  *free_bytes = *total = size_t(8) << 30;
  return kOk;
}

ACL int aclrtMalloc(void** address, size_t bytes, int) {
  *address = allocate(bytes);
  return *address ? kOk : report(kNoMemory, "no memory");
}
ACL int aclrtMallocAlign32(void** address, size_t bytes, int policy) { return aclrtMalloc(address, bytes, policy); }
ACL int aclrtFree(void* address) { return release(address) ? kOk : report(kInvalid, "no such memory"); }
ACL int aclrtMallocHost(void** address, size_t bytes) {
  *address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  return *address ? kOk : report(kNoMemory, "no memory");
}
ACL int aclrtFreeHost(void* address) { return std::free(address), kOk; }

ACL int aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int) {
  if (const int error = synchronize_all()) return error;
  return copy_now(to, room, from, bytes);
}
ACL int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int, void* stream) {
  return enqueue(stream_of(stream), [=] { return copy_now(to, room, from, bytes); });
}
ACL int aclrtMemset(void* to, size_t room, int value, size_t bytes) {
  if (bytes > room) return report(kInvalid, "more bytes than there are");
  std::memset(memory_at(to), value, bytes);
  return kOk;
}
ACL int aclrtMemsetAsync(void* to, size_t room, int value, size_t bytes, void* stream) {
  return enqueue(stream_of(stream), [=] { return aclrtMemset(to, room, value, bytes); });
}

ACL int aclrtCreateStream(void** stream) { return *stream = new_stream(), kOk; }
ACL int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return *stream = new_stream(), kOk; }
ACL int aclrtDestroyStream(void* stream) { return destroy(stream_of(stream)), kOk; }
ACL int aclrtDestroyStreamForce(void* stream) { return destroy(stream_of(stream)), kOk; }
ACL int aclrtSynchronizeStream(void* stream) { return synchronize(stream_of(stream)); }
ACL int aclrtSynchronizeStreamWithTimeout(void* stream, int) { return synchronize(stream_of(stream)); }
ACL int aclrtSynchronizeDevice() { return synchronize_all(); }
ACL int aclrtSynchronizeDeviceWithTimeout(int) { return synchronize_all(); }
ACL int aclrtStreamQuery(void* stream, int* status) { return *status = 0, synchronize(stream_of(stream)); }
ACL int aclrtStreamGetId(void*, int* id) { return *id = 0, kOk; }

ACL int aclrtCreateEventWithFlag(void** event, uint32_t) { return *event = new Event, kOk; }
ACL int aclrtCreateEventExWithFlag(void** event, uint32_t) { return *event = new Event, kOk; }
ACL int aclrtDestroyEvent(void* event) { return delete static_cast<Event*>(event), kOk; }
ACL int aclrtRecordEvent(void* event, void* stream) {
  return record(static_cast<Event*>(event), stream_of(stream)), kOk;
}
ACL int aclrtResetEvent(void*, void*) { return kOk; }
ACL int aclrtSynchronizeEvent(void* event) { return wait_for(*static_cast<Event*>(event)); }
ACL int aclrtStreamWaitEvent(void* stream, void* event) {
  return stream_waits(stream_of(stream), *static_cast<Event*>(event));
}
ACL int aclrtQueryEventStatus(void* event, int* status) {
  return *status = 1, wait_for(*static_cast<Event*>(event));
}
ACL int aclrtQueryEventWaitStatus(void* event, int* status) {
  return *status = 0, wait_for(*static_cast<Event*>(event));
}
ACL int aclrtEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 0, kOk; }

ACL int aclrtPeekAtLastError(int) { return kOk; }
ACL int aclrtGetLastError(int) { return kOk; }
ACL int aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kOk; }
ACL int aclrtSetDeviceSatMode(int) { return kOk; }
ACL int aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
ACL int aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
ACL int aclSetCompileopt(int, const char*) { return kOk; }

namespace {
int64_t options[64];
}
ACL int aclrtSetSysParamOpt(int option, int64_t value) {
  if (option >= 0 && option < 64) options[option] = value;
  return kOk;
}
ACL int aclrtGetSysParamOpt(int option, int64_t* value) {
  return *value = option >= 0 && option < 64 ? options[option] : 0, kOk;
}
ACL int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
ACL int aclrtCtxGetSysParamOpt(int option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }

// Kernels: what the tests' compiler makes is a shared library.

namespace {

constexpr uint32_t kVectorCore = 0x41415246, kCubeCore = 0x41494343;  // ACL_RT_BINARY_MAGIC_ELF_...

struct LoadOptions {  // aclrtBinaryLoadOptions
  struct {
    int type;
    uint32_t magic, rest[3];
  }* options;
  size_t count;
};

struct Binary {
  void* library;
  uint32_t magic;
};

struct Kernel {
  void (*run)(const void* packed);
  size_t bytes;  // of its arguments
  int arch;
  twin::Kind kind;
  std::string name;
};

}  // namespace

ACL int aclrtBinaryLoadFromData(const void* data, size_t bytes, const void* options, void** binary) {
  const auto* given = static_cast<const LoadOptions*>(options);
  if (!given || given->count != 1 || given->options->type != 2) return report(kInvalid, "no magic number is given");
  char path[] = "/tmp/standin_kernel_XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) return report(kInvalid, "no temporary file");
  const bool written = write(file, data, bytes) == ssize_t(bytes);
  close(file);
  void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path);
  if (!library) return report(kInvalid, std::string("the object cannot be loaded: ") + (written ? dlerror() : path));
  *binary = new Binary{library, given->options->magic};  // as long as the process
  return kOk;
}
ACL int aclrtBinaryUnLoad(void* binary) { return dlclose(static_cast<Binary*>(binary)->library), kOk; }

ACL int aclrtBinaryGetFunction(void* binary, const char* name, void** function) {
  const Binary& from = *static_cast<Binary*>(binary);
  const auto find = [&](const std::string& suffix) { return dlsym(from.library, (name + suffix).c_str()); };
  const auto run = reinterpret_cast<void (*)(const void*)>(find("__twin"));
  const auto* bytes = static_cast<const size_t*>(find("__twin_bytes"));
  const auto* arch = static_cast<const int*>(find("__twin_arch"));
  const auto* kind = static_cast<const int*>(find("__twin_kind"));
  if (!run || !bytes || !arch || !kind) return report(kInvalid, std::string("the object has no kernel ") + name);
  const twin::Kind core = twin::Kind(*kind);
  if (from.magic != (core == twin::Kind::cube ? kCubeCore : kVectorCore))
    return report(kInvalid, std::string(name) + " was loaded for cores of another kind");
  *function = new Kernel{run, *bytes, *arch, core, name};  // as long as the process
  return kOk;
}

ACL int aclrtLaunchKernelWithHostArgs(void* function, uint32_t blocks, void* stream, void*, void* arguments,
                                      size_t bytes, void*, size_t) {
  const Kernel& kernel = *static_cast<const Kernel*>(function);
  if (kernel.arch != arch_number()) return report(kKernelFailed, kernel.name + " was built for another architecture");
  if (kernel.bytes != bytes)
    return report(kInvalid, kernel.name + " takes " + std::to_string(kernel.bytes) + " bytes of arguments, got " +
                                std::to_string(bytes));
  const std::string packed(static_cast<const char*>(arguments), bytes);
  return enqueue(stream_of(stream), [=, &kernel] {
    static const twin::Options options = twin::options_from_environment();
    twin::Work work;
    const std::string fault =
        twin::launch(kernel.arch, kernel.kind, int(blocks), options, allocations(), kernel.run, packed.data(), work);
    if (std::getenv("DEEPINFER_STANDIN_COUNT"))
      std::fprintf(stderr, "[work] %s %u %lld %lld %lld %lld %lld %lld %lld %lld %lld\n", kernel.name.c_str(), blocks,
                   (long long)work.vectors, (long long)work.vector_repeats, (long long)work.copies,
                   (long long)work.copied_bytes, (long long)work.scalars, (long long)work.products,
                   (long long)work.fractals, (long long)work.loads, (long long)work.loaded_bytes);
    return fault.empty() ? int(kOk) : report(kKernelFailed, kernel.name + ": " + fault);
  });
}
