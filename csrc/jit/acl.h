// The part of CANN's public runtime interface that loading and launching need. Declared here and looked up at run time
// in libascendcl.so, which torch_npu has loaded, so that building and importing take no CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace deepinfer::jit::acl {

using Error = int;  // aclError; 0 is success
using Binary = void*;
using Function = void*;
using Stream = void*;

enum DeviceAttribute : int {
  kCubeCores = 102,
  kVectorCores = 201,
};

// aclrtBinaryLoadOption
struct LoadOption {
  static constexpr int kMagic = 2;
  static constexpr uint32_t kVectorCore = 0x41415246, kCubeCore = 0x41494343;
  int type;
  union {
    uint32_t magic;
    uint32_t reserved[4];
  };
};
struct LoadOptions {
  LoadOption* options;
  size_t count;
};

struct Runtime {
  const char* (*get_recent_error)();
  const char* (*get_soc_name)();
  Error (*get_device)(int32_t*);
  Error (*set_device)(int32_t);
  Error (*get_device_info)(uint32_t device, DeviceAttribute, int64_t* value);
  Error (*binary_load)(const void* data, size_t bytes, const LoadOptions*, Binary*);
  Error (*binary_get_function)(Binary, const char* name, Function*);
  Error (*launch)(Function, uint32_t blocks, Stream, void* config, void* arguments, size_t bytes, void* placeholders,
                  size_t placeholder_count);
};

// Throws std::runtime_error when there is no CANN, or one that lacks a function.
const Runtime& runtime();

// Throws std::runtime_error "<what>: ACL error 507035 (the runtime's own message)" unless `error` is success.
void check(Error error, const std::string& what);

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int32_t before_ = -1;
  bool changed_ = false;
};

}  // namespace deepinfer::jit::acl
