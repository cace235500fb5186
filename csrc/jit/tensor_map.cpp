#include "tensor_map.h"

#include <string>

#include "cuda_driver.h"

namespace deepinfer::jit {

namespace {

std::string described(const TensorMapSpec& spec) {
  std::string text;
  auto list = [&](const char* what, auto* values, int count) {
    text.append(what);
    while (count-- > 0) text.append(" ").append(std::to_string(values[count]));
  };
  list(" of", spec.sizes, spec.rank);
  list(", box", spec.box, spec.rank);
  list(", strides in bytes", spec.strides, spec.rank - 1);
  return text;
}

}  // namespace

TensorMap encode_tensor_map(const TensorMapSpec& spec, const char* what) {
  constexpr int kInterleaveNone = 0, kPromote256Bytes = 3, kFillZero = 0;
  constexpr uint32_t kElementStrides[TensorMapSpec::kMaxRank] = {1, 1, 1, 1, 1};
  TensorMap map;
  if (cu::Result result = cu::driver().tensor_map_encode_tiled(
          &map, int(spec.type), uint32_t(spec.rank), spec.address, spec.sizes, spec.strides, spec.box, kElementStrides,
          kInterleaveNone, int(spec.swizzle), kPromote256Bytes, kFillZero))
    cu::check(result, std::string(what) + ": no tensor map for a tensor" + described(spec));
  return map;
}

}  // namespace deepinfer::jit
