#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace deepinfer::jit::cu {

namespace {

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library)
    throw std::runtime_error("the NVIDIA driver is missing: " + std::string(dlerror()));
  Driver d;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function)
      throw std::runtime_error("the NVIDIA driver is too old: it has no " + std::string(name) + "; CUDA 12 is needed");
  };
  find(d.get_error_name, "cuGetErrorName");
  find(d.get_error_string, "cuGetErrorString");
  find(d.device_get_attribute, "cuDeviceGetAttribute");
  find(d.device_primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(d.context_get_current, "cuCtxGetCurrent");
  find(d.context_push_current, "cuCtxPushCurrent_v2");
  find(d.context_pop_current, "cuCtxPopCurrent_v2");
  find(d.module_load_data, "cuModuleLoadData");
  find(d.module_get_function, "cuModuleGetFunction");
  find(d.function_set_attribute, "cuFuncSetAttribute");
  find(d.launch_kernel, "cuLaunchKernelEx");
  find(d.stream_is_capturing, "cuStreamIsCapturing");
  find(d.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

void check(Result result, const std::string& what) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  throw std::runtime_error(what + ": " + (name ? name : "CUDA error " + std::to_string(result)) +
                           (text ? " (" + std::string(text) + ")" : ""));
}

ContextScope::ContextScope(const Driver& driver, Context context) : driver_(driver) {
  Context current = nullptr;
  check(driver.context_get_current(&current), "reading the current CUDA context");
  pushed_ = current != context;
  if (pushed_) check(driver.context_push_current(context), "making a CUDA context current");
}

ContextScope::~ContextScope() {
  Context popped;
  if (pushed_) driver_.context_pop_current(&popped);
}

}  // namespace deepinfer::jit::cu
