// Tensors, buffers and queues of the Ascend C programming interface, on the model of a core.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "machine.h"
#include "types.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, CO1, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
  MTE2_V, V_MTE2, MTE3_V, V_MTE3, MTE2_MTE3, MTE3_MTE2, MTE2_S, S_MTE2, MTE3_S, S_MTE3, V_S, S_V,
  MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, M_FIX, FIX_M, FIX_MTE2, MTE2_FIX,
};  // fmt: skip

namespace detail {

constexpr twin::Space space_of(TPosition position) {
  switch (position) {
    case TPosition::A1:
    case TPosition::B1: return twin::kL1;
    case TPosition::A2: return twin::kL0A;
    case TPosition::B2: return twin::kL0B;
    case TPosition::CO1: return twin::kL0C;
    default: return twin::kUB;
  }
}

constexpr std::pair<twin::Pipe, twin::Pipe> pipes_of(HardEvent event) {
  using namespace twin;
  constexpr std::pair<Pipe, Pipe> kPairs[] = {
      {kMTE2, kV}, {kV, kMTE2}, {kMTE3, kV}, {kV, kMTE3}, {kMTE2, kMTE3}, {kMTE3, kMTE2}, {kMTE2, kS}, {kS, kMTE2},
      {kMTE3, kS}, {kS, kMTE3}, {kV, kS}, {kS, kV}, {kMTE2, kMTE1}, {kMTE1, kMTE2}, {kMTE1, kM}, {kM, kMTE1},
      {kM, kFix}, {kFix, kM}, {kFix, kMTE2}, {kMTE2, kFix}};  // fmt: skip
  return kPairs[int(event)];
}

// Which pipe fills the buffers of a queue and which one empties them.
constexpr std::pair<twin::Pipe, twin::Pipe> ends_of(TPosition position) {
  using namespace twin;
  switch (position) {
    case TPosition::VECIN: return {kMTE2, kV};
    case TPosition::VECOUT: return {kV, kMTE3};
    case TPosition::A1:
    case TPosition::B1: return {kMTE2, kMTE1};
    case TPosition::A2:
    case TPosition::B2: return {kMTE1, kM};
    default: return {kM, kFix};
  }
}

}  // namespace detail

// A piece of a memory on the core, without its element type.
struct Place {
  twin::Space space = twin::kUB;
  size_t offset = 0, bytes = 0;
  int buffer = -1;  // of a queue
};

namespace detail {

// What does not depend on the element type is compiled once (tensor.cpp), not with every kernel.
Place skip(const Place& place, uint32_t elements, size_t item);
void require(const Place& place, size_t bytes, size_t alignment);
char* scalar(const Place& place, const char* name, uint32_t index, size_t item, bool write);  // an access, and its address
const char* scalar(const char* data, uint64_t bytes, uint64_t offset, size_t item);          // in global memory
void require_global(uint64_t bytes, uint64_t offset, uint64_t count);
void require_elements(uint64_t elements, uint64_t offset);

}  // namespace detail

class TPipe;

// Copies are views of the same bytes.
template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  LocalTensor(const Place& place) : place_(place) {}

  LocalTensor operator[](uint32_t elements) const { return detail::skip(place_, elements, sizeof(T)); }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const { return place_; }

  uint32_t GetSize() const { return uint32_t(place_.bytes / sizeof(T)); }

  T GetValue(uint32_t index) const {
    return *reinterpret_cast<const T*>(detail::scalar(place_, "GetValue", index, sizeof(T), false));
  }
  template <typename U>
  void SetValue(uint32_t index, U value) const {
    static_assert(std::is_same_v<T, U> || (std::is_arithmetic_v<T> && std::is_arithmetic_v<U>));
    *reinterpret_cast<T*>(detail::scalar(place_, "SetValue", index, sizeof(T), true)) = T(value);
  }

  // For the model's own use.
  const Place& place() const { return place_; }
  T* raw() const { return reinterpret_cast<T*>(twin::core().data(place_.space) + place_.offset); }
  twin::Space space() const { return place_.space; }
  size_t offset() const { return place_.offset; }
  size_t bytes() const { return place_.bytes; }
  void require(size_t bytes, size_t alignment) const { detail::require(place_, bytes, alignment); }

 private:
  Place place_;
};

// Device memory with the number of elements that the kernel may touch.
template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* data, uint64_t elements) {
    data_ = data;
    elements_ = elements;
  }
  GlobalTensor operator[](uint64_t elements) const {
    detail::require_elements(elements_, elements);
    GlobalTensor rest;
    rest.SetGlobalBuffer(data_ + elements, elements_ - elements);
    return rest;
  }
  uint64_t GetSize() const { return elements_; }

  T GetValue(uint64_t index) const {
    const auto* data = reinterpret_cast<const char*>(data_);
    return *reinterpret_cast<const T*>(detail::scalar(data, elements_ * sizeof(T), index * sizeof(T), sizeof(T)));
  }

  // The address of `count` bytes, all of which belong to the buffer.
  char* bytes(uint64_t offset, uint64_t count) const {
    detail::require_global(elements_ * sizeof(T), offset, count);
    return reinterpret_cast<char*>(data_) + offset;
  }

 private:
  T* data_ = nullptr;
  uint64_t elements_ = 0;
};

namespace detail {

struct Queue;

class QueueBase {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor() { return allocate(); }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) { return enqueue(tensor.place()); }
  template <typename T>
  LocalTensor<T> DeQue() { return dequeue(); }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) { release(tensor.place()); }

 private:
  friend class AscendC::TPipe;

  Place allocate();
  bool enqueue(const Place& tensor);
  Place dequeue();
  void release(const Place& tensor);

  Queue* queue_ = nullptr;  // the pipe's
};

}  // namespace detail

template <TPosition position, int depth>
class TQue : public detail::QueueBase {};

// Filled and emptied by copies: what is in its buffers is not computed with.
template <TPosition from, TPosition to, int depth>
class TQueBind : public detail::QueueBase {
  static_assert(from == TPosition::VECIN && to == TPosition::VECOUT);
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const { return place_; }
  template <typename T>
  LocalTensor<T> Get(uint32_t elements) const {
    if (elements * sizeof(T) > place_.bytes) twin::core().fail("more elements than the buffer has");
    return Place{place_.space, place_.offset, elements * sizeof(T)};
  }

 private:
  friend class TPipe;
  Place place_;
};

class TPipe {
 public:
  TPipe();
  TPipe(const TPipe&) = delete;
  ~TPipe() noexcept(false);

  template <TPosition position, int depth>
  bool InitBuffer(TQue<position, depth>& queue, uint8_t count, uint32_t bytes) {
    return make(queue, detail::space_of(position), detail::ends_of(position), count, bytes);
  }
  template <TPosition from, TPosition to, int depth>
  bool InitBuffer(TQueBind<from, to, depth>& queue, uint8_t count, uint32_t bytes) {
    return make(queue, twin::kUB, {twin::kMTE2, twin::kMTE3}, count, bytes);
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
    buffer.place_ = make(detail::space_of(position), bytes);
    return true;
  }

  template <HardEvent event>
  int8_t AllocEventID() {
    twin::core().name_instruction("AllocEventID");
    return int8_t(twin::core().take_event(detail::pipes_of(event).first, detail::pipes_of(event).second));
  }
  template <HardEvent event>
  void ReleaseEventID(int8_t id) {
    twin::core().release_event(detail::pipes_of(event).first, detail::pipes_of(event).second, id);
  }

 private:
  bool make(detail::QueueBase& queue, twin::Space space, std::pair<twin::Pipe, twin::Pipe> ends, uint8_t count,
            uint32_t bytes);
  Place make(twin::Space space, uint32_t bytes);

  std::vector<std::unique_ptr<detail::Queue>> queues_;
};

template <HardEvent event>
void SetFlag(int32_t id) {
  twin::core().name_instruction("SetFlag");
  twin::core().set_flag(detail::pipes_of(event).first, detail::pipes_of(event).second, id);
}
template <HardEvent event>
void WaitFlag(int32_t id) {
  twin::core().name_instruction("WaitFlag");
  twin::core().wait_flag(detail::pipes_of(event).first, detail::pipes_of(event).second, id);
}

inline int64_t GetBlockIdx() { return twin::core().index(); }
inline int64_t GetBlockNum() { return twin::core().count(); }

}  // namespace AscendC

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

namespace AscendC {

template <pipe_t pipe>
void PipeBarrier() {
  twin::core().name_instruction("PipeBarrier");
  if constexpr (pipe == PIPE_ALL) twin::core().barrier_all();
  else twin::core().barrier(twin::Pipe(pipe));
}

}  // namespace AscendC
