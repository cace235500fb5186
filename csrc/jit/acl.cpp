#include "acl.h"

#include <dlfcn.h>

#include <stdexcept>
#include <type_traits>

namespace deepinfer::jit::acl {

namespace {

Runtime load_runtime() {
  void* library = dlopen("libascendcl.so", RTLD_NOW);
  if (!library) throw std::runtime_error("the CANN runtime is missing: " + std::string(dlerror()));
  Runtime r;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function)
      throw std::runtime_error("the CANN runtime is too old: it has no " + std::string(name));
  };
  find(r.get_recent_error, "aclGetRecentErrMsg");
  find(r.get_soc_name, "aclrtGetSocName");
  find(r.get_device, "aclrtGetDevice");
  find(r.set_device, "aclrtSetDevice");
  find(r.get_device_info, "aclrtGetDeviceInfo");
  find(r.binary_load, "aclrtBinaryLoadFromData");
  find(r.binary_get_function, "aclrtBinaryGetFunction");
  find(r.launch, "aclrtLaunchKernelWithHostArgs");
  return r;
}

}  // namespace

const Runtime& runtime() {
  static const Runtime loaded = load_runtime();
  return loaded;
}

void check(Error error, const std::string& what) {
  if (error == 0) return;
  const char* text = runtime().get_recent_error();
  throw std::runtime_error(what + ": ACL error " + std::to_string(error) +
                           (text && *text ? " (" + std::string(text) + ")" : ""));
}

DeviceScope::DeviceScope(int32_t device) {
  const bool known = runtime().get_device(&before_) == 0;
  changed_ = !known || before_ != device;
  if (!changed_) return;
  if (!known) before_ = -1;
  check(runtime().set_device(device), "making NPU " + std::to_string(device) + " current");
}

DeviceScope::~DeviceScope() {
  if (changed_ && before_ >= 0) runtime().set_device(before_);
}

}  // namespace deepinfer::jit::acl
