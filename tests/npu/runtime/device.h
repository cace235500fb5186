// Device memory, streams and events of the stand-in runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../twin/machine.h"

namespace standin {

enum Error : int {
  kOk = 0,
  kInvalid = 100000,       // ACL_ERROR_INVALID_PARAM
  kNoContext = 107002,     // ACL_ERROR_RT_CONTEXT_NULL
  kNoMemory = 207001,      // ACL_ERROR_RT_MEMORY_ALLOCATION
  kNotSupported = 500002,  // a call that is not modelled
  kKernelFailed = 507035,  // ACL_ERROR_RT_VECTOR_CORE_EXCEPTION
};

// Sets what aclGetRecentErrMsg returns, and returns the code.
int report(Error code, const std::string& message);
const char* recent_message();

// Device memory has addresses at which every access is a segmentation fault: only copies and kernels know where it is.
void* allocate(size_t bytes);
bool release(void* address);
std::vector<twin::Range> allocations();  // in the order of their addresses

// Where what has this address is: device memory, or the host's own.
char* memory_at(const void* address);

struct Stream;
Stream* new_stream();
Stream* default_stream();
void destroy(Stream* stream);

// Runs the task now or, in delayed mode (DEEPINFER_STANDIN=delayed), when somebody waits for it.
int enqueue(Stream* stream, std::function<int()> task);
int synchronize(Stream* stream);
int synchronize_all();

struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
};
void record(Event* event, Stream* stream);
int wait_for(const Event& event);                // the host waits
int stream_waits(Stream* stream, Event event);   // what follows on the stream waits

const char* soc_name();
int arch_number();

}  // namespace standin
