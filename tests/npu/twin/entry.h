// From the packed arguments of a launch to the parameters of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

namespace twin {

// Parameters lie one after the other, each at a multiple of its alignment and of 4.
template <typename T>
constexpr size_t place_after(size_t at) {
  constexpr size_t kAlignment = alignof(T) < 4 ? 4 : alignof(T);
  return (at + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename... Parameters>
void call(void (*kernel)(Parameters...), const void* packed) {
  const char* bytes = static_cast<const char*>(packed);
  size_t at = 0;
  const auto next = [&]<typename T>(const T*) {
    T value;
    at = place_after<T>(at);
    std::memcpy(&value, bytes + at, sizeof(value));
    at += sizeof(value);
    return value;
  };
  // Braces: in order.
  std::apply(kernel, std::tuple<Parameters...>{next(static_cast<const Parameters*>(nullptr))...});
}

template <typename... Parameters>
constexpr size_t packed_bytes(void (*)(Parameters...)) {
  size_t at = 0;
  ((at = place_after<Parameters>(at) + sizeof(Parameters)), ...);
  return (at + 7) / 8 * 8;
}

}  // namespace twin

// What the runtime looks up of a kernel, and the section by which compilers name it. `kind`: of the core that it is for.
#define TWIN_KERNEL(name, kind)                                                                                             \
  extern "C" __attribute__((visibility("default"))) void name##__twin(const void* packed) { twin::call(name, packed); } \
  extern "C" __attribute__((visibility("default"))) const size_t name##__twin_bytes;                                    \
  const size_t name##__twin_bytes = twin::packed_bytes(name);                                                           \
  extern "C" __attribute__((visibility("default"))) const int name##__twin_arch;                                        \
  const int name##__twin_arch = TWIN_ARCH;                                                                              \
  extern "C" __attribute__((visibility("default"))) const int name##__twin_kind;                                        \
  const int name##__twin_kind = int(twin::Kind::kind);                                                                  \
  __attribute__((used, section(".ascend.meta." #name))) static const char name##_meta = 0;
