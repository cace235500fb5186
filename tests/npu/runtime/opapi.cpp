// The two operators of CANN's own library without which torch_npu cannot move a tensor on a 950: copy and zero. An
// operator that is not here does not exist, and torch_npu says so by name.

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../twin/types.h"
#include "device.h"

using namespace standin;

#define ACL extern "C" __attribute__((visibility("default")))

namespace {

enum Type : int {
  kFloat = 0, kHalf = 1, kInt8 = 2, kInt32 = 3, kUint8 = 4, kInt16 = 6, kInt64 = 9, kDouble = 11, kBool = 12,
  kComplex64 = 16, kBfloat16 = 27, kE5m2 = 35, kE4m3 = 36, kE8m0 = 37, kE2m1 = 40,
};  // fmt: skip

struct Tensor {
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  int type;
  char* data;

  size_t item() const {
    switch (type) {
      case kInt64:
      case kComplex64:
      case kDouble: return 8;
      case kFloat:
      case kInt32: return 4;
      case kHalf:
      case kBfloat16:
      case kInt16: return 2;
      case kInt8:
      case kUint8:
      case kBool:
      case kE5m2:
      case kE4m3:
      case kE8m0:
      case kE2m1: return 1;  // two codes
      default: return 0;
    }
  }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  // Element `index` of a tensor of the given sizes, to which this one is broadcast.
  char* at(int64_t index, const std::vector<int64_t>& shape) const {
    int64_t element = offset;
    const size_t missing = shape.size() - sizes.size();
    for (size_t d = shape.size(); d-- > 0;) {
      if (d >= missing && sizes[d - missing] != 1) element += index % shape[d] * strides[d - missing];
      index /= shape[d];
    }
    return data + element * int64_t(item());
  }
};

template <typename T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <typename T>
void store(char* to, T value) { std::memcpy(to, &value, sizeof(value)); }

double from_exponent(uint8_t exponent) {
  return exponent == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, exponent - 127);
}

bool read(int type, const char* from, double& value) {
  switch (type) {
    case kFloat: return value = load<float>(from), true;
    case kHalf: return value = twin::to_float(load<half>(from)), true;
    case kBfloat16: return value = twin::to_float(load<bfloat16_t>(from)), true;
    case kDouble: return value = load<double>(from), true;
    case kInt8: return value = load<int8_t>(from), true;
    case kUint8: return value = load<uint8_t>(from), true;
    case kBool: return value = load<uint8_t>(from) != 0, true;
    case kInt16: return value = load<int16_t>(from), true;
    case kInt32: return value = load<int32_t>(from), true;
    case kInt64: return value = double(load<int64_t>(from)), true;
    case kE4m3: return value = twin::to_float(load<fp8_e4m3fn_t>(from)), true;
    case kE8m0: return value = from_exponent(load<uint8_t>(from)), true;
    default: return false;
  }
}
bool write(int type, char* to, double value) {
  switch (type) {
    case kFloat: return store(to, float(value)), true;
    case kHalf: return store(to, twin::from_float<half>(float(value))), true;
    case kBfloat16: return store(to, twin::from_float<bfloat16_t>(float(value))), true;
    case kDouble: return store(to, value), true;
    case kInt8: return store(to, int8_t(value)), true;
    case kUint8: return store(to, uint8_t(value)), true;
    case kBool: return store(to, uint8_t(value != 0)), true;
    case kInt16: return store(to, int16_t(value)), true;
    case kInt32: return store(to, int32_t(value)), true;
    case kInt64: return store(to, int64_t(value)), true;
    case kE4m3: return store(to, std::isnan(value) ? uint8_t(0x7f) : twin::from_float<fp8_e4m3fn_t>(float(value)).bits), true;
    case kE8m0: return store(to, std::isnan(value) ? uint8_t(0xff) : uint8_t(std::ilogb(value) + 127)), true;
    case kComplex64: return store(to, float(value)), store(to + 4, 0.f), true;
    default: return false;
  }
}

struct Executor {
  Tensor to, from;
};

int copy(const Executor& job) {
  const int64_t count = job.to.count();
  const size_t item = job.to.item();
  for (int64_t i = 0; i < count; ++i) {
    char* to = job.to.at(i, job.to.sizes);
    const char* from = job.from.at(i, job.to.sizes);
    double value;
    if (job.to.type == job.from.type) std::memcpy(to, from, item);
    else if (!read(job.from.type, from, value) || !write(job.to.type, to, value))
      return report(kNotSupported, "a conversion that is not modelled");
  }
  return kOk;
}

int zero(const Executor& job) {
  const int64_t count = job.to.count();
  for (int64_t i = 0; i < count; ++i) std::memset(job.to.at(i, job.to.sizes), 0, job.to.item());
  return kOk;
}

int prepare(const void* to, const void* from, uint64_t* workspace, void** executor) {
  auto job = std::make_unique<Executor>();
  job->to = *static_cast<const Tensor*>(to);
  job->from = *static_cast<const Tensor*>(from);
  if (!job->to.item() || !job->from.item()) return report(kNotSupported, "an element type that is not modelled");
  *workspace = 0;
  *executor = job.release();
  return kOk;
}

int start(void* executor, void* stream, int (*work)(const Executor&)) {
  const std::shared_ptr<Executor> job(static_cast<Executor*>(executor));
  return enqueue(static_cast<Stream*>(stream), [=] {
    for (Tensor* tensor : {&job->to, &job->from}) tensor->data = memory_at(tensor->data);
    return work(*job);
  });
}

}  // namespace

ACL void* aclCreateTensor(const int64_t* sizes, uint64_t dims, int type, const int64_t* strides, int64_t offset, int,
                          const int64_t*, uint64_t, void* data) {
  return new Tensor{{sizes, sizes + dims}, {strides, strides + dims}, offset, type, static_cast<char*>(data)};
}
ACL int aclDestroyTensor(const void* tensor) { return delete static_cast<const Tensor*>(tensor), kOk; }

ACL int aclnnInplaceCopyGetWorkspaceSize(void* to, const void* from, uint64_t* workspace, void** executor) {
  return prepare(to, from, workspace, executor);
}
ACL int aclnnInplaceCopy(void*, uint64_t, void* executor, void* stream) { return start(executor, stream, copy); }

ACL int aclnnInplaceZeroGetWorkspaceSize(void* to, uint64_t* workspace, void** executor) {
  return prepare(to, to, workspace, executor);
}
ACL int aclnnInplaceZero(void*, uint64_t, void* executor, void* stream) { return start(executor, stream, zero); }
