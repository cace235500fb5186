// The part of the CUDA driver's public C interface that loading and launching need. Declared here and looked up in
// libcuda.so.1 at run time, so that building takes no CUDA toolkit and importing no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace deepinfer::jit::cu {

using Result = int;  // CUresult; 0 is success
constexpr Result kNotInitialized = 3;
using Device = int;
struct ContextObject;
struct ModuleObject;
struct FunctionObject;
struct StreamObject;
using Context = ContextObject*;
using Module = ModuleObject*;
using Function = FunctionObject*;
using Stream = StreamObject*;

enum DeviceAttribute : int {
  kSharedMemoryPerBlock = 97,  // ..._MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
  kMultiprocessorCount = 16,
  kL2CacheSize = 38,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
};

enum FunctionAttribute : int {
  kMaxDynamicSharedBytes = 8,
  kNonPortableClusterAllowed = 14,
};

enum LaunchAttributeId : int {
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
};

union LaunchAttributeValue {
  char reserved[64];
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic_stream_serialization;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[8 - sizeof(int)];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get_attribute)(int*, DeviceAttribute, Device);
  Result (*device_primary_context_retain)(Context*, Device);
  Result (*context_get_current)(Context*);
  Result (*context_push_current)(Context);
  Result (*context_pop_current)(Context*);
  Result (*module_load_data)(Module*, const void* image);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*function_set_attribute)(Function, FunctionAttribute, int value);
  Result (*launch_kernel)(const LaunchConfig*, Function, void** arguments, void** extra);
  Result (*stream_is_capturing)(Stream, int* status);
  Result (*tensor_map_encode_tiled)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                    const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion, int fill);
};

// Throws std::runtime_error when there is no driver, or one older than CUDA 12.
const Driver& driver();

// Throws std::runtime_error "<what>: CUDA_ERROR_... (description)" unless `result` is success.
void check(Result result, const std::string& what);

// Makes a context current for a scope.
class ContextScope {
 public:
  ContextScope(const Driver& driver, Context context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  bool pushed_;
};

}  // namespace deepinfer::jit::cu
