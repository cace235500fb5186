// Stands in for the NVIDIA driver, preloaded as libcuda.so.1: two devices of compute capability 9.0 and 8.0, and a
// record of every launch. Also stands in for torch's current stream.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  struct {
    int id, padding;
    unsigned value[16];
  }* attributes;
  unsigned attribute_count;
} LaunchConfig;

static char record[4096];
static intptr_t current_context;
static int capturing, modules_loaded, initialized_by;

const char* fake_record(void) { return record; }
int fake_modules_loaded(void) { return modules_loaded; }
void fake_set_capturing(int value) { capturing = value; }

static void note(const char* text) { strncat(record, text, sizeof(record) - strlen(record) - 1); }

// Device 0 has context 100, device 1 context 101; stream 200 belongs to device 0, and so on.
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = (void*)(intptr_t)(200 + device);
  return 0;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : "CUDA_ERROR_X";
  return 0;
}
int cuGetErrorString(int error, const char** text) { return *text = "as the fake driver has it", 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device > 1) return 101;
  *value = attribute == 75 ? (device == 0 ? 9 : 8) : attribute == 76 ? 0 : 1000 + attribute;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (initialized_by == 0) initialized_by = getpid();
  if (initialized_by != getpid()) return 3;  // as the real one does in a forked child
  *context = (void*)(intptr_t)(100 + device);
  return 0;
}

int cuCtxGetCurrent(void** context) { return *context = (void*)current_context, 0; }
int cuCtxPushCurrent_v2(void* context) { return current_context = (intptr_t)context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = (void*)current_context, current_context = 0, 0; }

int cuModuleLoadData(void** module, const void* image) {
  ++modules_loaded;
  *module = (void*)current_context;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  char text[100];
  snprintf(text, sizeof(text), "load %s in %ld\n", name, (long)(intptr_t)module);
  note(text);
  *function = module;
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  char text[100];
  snprintf(text, sizeof(text), "attribute %d = %d\n", attribute, value);
  note(text);
  return attribute == 8 && value > 300000 ? 1 : 0;
}

int cuLaunchKernelEx(const LaunchConfig* launch, void* function, void** arguments, void** extra) {
  char text[300];
  snprintf(text, sizeof(text), "launch %u of %u, shared %u, stream %ld, context %ld of %ld, argument %lx",
           launch->grid[0], launch->block[0], launch->shared_bytes, (long)(intptr_t)launch->stream,
           (long)current_context, (long)(intptr_t)function, *(long*)arguments[0]);
  note(text);
  for (unsigned i = 0; i < launch->attribute_count; ++i) {
    snprintf(text, sizeof(text), ", [%d] = %u", launch->attributes[i].id, launch->attributes[i].value[0]);
    note(text);
  }
  note("\n");
  return 0;
}

int cuStreamIsCapturing(void* stream, int* status) { return *status = capturing, 0; }
int cuTensorMapEncodeTiled(void) { return 1; }
