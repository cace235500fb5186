// Tensors, buffers and queues of the Ascend C programming interface, on the model of a core.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
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

class TPipe;

// A piece of a memory on the core. Copies are views of the same bytes.
template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  LocalTensor(twin::Space space, size_t offset, size_t bytes, int buffer = -1)
      : space_(space), offset_(offset), bytes_(bytes), buffer_(buffer) {}

  LocalTensor operator[](uint32_t elements) const {
    const size_t skipped = size_t(elements) * sizeof(T);
    if (skipped > bytes_) twin::core().fail("an offset of " + std::to_string(elements) + " elements, past the tensor");
    return {space_, offset_ + skipped, bytes_ - skipped, buffer_};
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const { return {space_, offset_, bytes_, buffer_}; }

  uint32_t GetSize() const { return uint32_t(bytes_ / sizeof(T)); }

  T GetValue(uint32_t index) const {
    scalar_access("GetValue", index, false);
    return raw()[index];
  }
  template <typename U>
  void SetValue(uint32_t index, U value) const {
    static_assert(std::is_same_v<T, U> || (std::is_arithmetic_v<T> && std::is_arithmetic_v<U>));
    scalar_access("SetValue", index, true);
    raw()[index] = T(value);
  }

  // For the model's own use.
  T* raw() const { return reinterpret_cast<T*>(twin::core().data(space_) + offset_); }
  twin::Space space() const { return space_; }
  size_t offset() const { return offset_; }
  size_t bytes() const { return bytes_; }
  int buffer() const { return buffer_; }
  void require(size_t bytes, size_t alignment) const {
    twin::Core& core = twin::core();
    if (offset_ % alignment)
      core.fail("the address " + std::to_string(offset_) + " is not a multiple of " + std::to_string(alignment));
    if (bytes > bytes_)
      core.fail(std::to_string(bytes) + " bytes of a tensor that has " + std::to_string(bytes_));
  }

 private:
  void scalar_access(const char* name, uint32_t index, bool write) const {
    twin::Core& core = twin::core();
    const uint32_t tick = core.issue(twin::kS, name);
    require((size_t(index) + 1) * sizeof(T), sizeof(T));
    core.access(twin::kS, tick, space_, offset_ + index * sizeof(T), sizeof(T), write);
  }

  twin::Space space_ = twin::kUB;
  size_t offset_ = 0, bytes_ = 0;
  int buffer_ = -1;
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
    if (elements > elements_)
      twin::core().fail("an offset of " + std::to_string(elements) + " elements into a buffer of " +
                        std::to_string(elements_));
    GlobalTensor rest;
    rest.SetGlobalBuffer(data_ + elements, elements_ - elements);
    return rest;
  }
  uint64_t GetSize() const { return elements_; }

  T GetValue(uint64_t index) const {
    twin::Core& core = twin::core();
    const uint32_t tick = core.issue(twin::kS, "GetValue of global memory");
    core.access_global(twin::kS, tick, bytes(index * sizeof(T), sizeof(T)), sizeof(T), false);
    return data_[index];
  }

  // The address of `count` bytes, all of which belong to the buffer.
  char* bytes(uint64_t offset, uint64_t count) const {
    if (offset + count > elements_ * sizeof(T))
      twin::core().fail("bytes " + std::to_string(offset) + " to " + std::to_string(offset + count) +
                        " of a buffer of " + std::to_string(elements_ * sizeof(T)) + " bytes in global memory");
    return reinterpret_cast<char*>(data_) + offset;
  }

 private:
  T* data_ = nullptr;
  uint64_t elements_ = 0;
};

namespace detail {

struct Queue {
  enum State { kFree, kAllocated, kQueued, kTaken };
  struct Buffer {
    size_t offset;
    State state = kFree;
    int filled = -1, emptied = -1;  // the events that are set
  };
  twin::Space space;
  twin::Pipe producer, consumer;
  size_t bytes = 0;
  std::vector<Buffer> buffers;
  std::deque<int> free, ready;

  void finish() const {
    twin::Core& core = twin::core();
    core.name_instruction("end of kernel");
    for (const Buffer& buffer : buffers) {
      if (buffer.state != kFree) core.fail("a tensor of a queue was never freed");
      if (buffer.emptied >= 0) core.wait_flag(consumer, producer, buffer.emptied);
    }
  }
};

}  // namespace detail

namespace detail {

class QueueBase {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    twin::Core& core = begin("AllocTensor");
    if (queue_->free.empty()) core.fail("the queue has no free buffer");
    const int index = take(queue_->free);
    detail::Queue::Buffer& buffer = queue_->buffers[index];
    if (buffer.emptied >= 0) {
      core.wait_flag(queue_->consumer, queue_->producer, buffer.emptied);
      core.release_event(queue_->consumer, queue_->producer, buffer.emptied);
      buffer.emptied = -1;
    }
    buffer.state = detail::Queue::kAllocated;
    return {queue_->space, buffer.offset, queue_->bytes, index};
  }

  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    twin::Core& core = begin("EnQue");
    detail::Queue::Buffer& buffer = own(tensor, detail::Queue::kAllocated, "EnQue of a tensor that is not allocated");
    buffer.filled = core.take_event(queue_->producer, queue_->consumer);
    core.set_flag(queue_->producer, queue_->consumer, buffer.filled);
    buffer.state = detail::Queue::kQueued;
    queue_->ready.push_back(tensor.buffer());
    return true;
  }

  template <typename T>
  LocalTensor<T> DeQue() {
    twin::Core& core = begin("DeQue");
    if (queue_->ready.empty()) core.fail("the queue is empty");
    const int index = take(queue_->ready);
    detail::Queue::Buffer& buffer = queue_->buffers[index];
    core.wait_flag(queue_->producer, queue_->consumer, buffer.filled);
    core.release_event(queue_->producer, queue_->consumer, buffer.filled);
    buffer.state = detail::Queue::kTaken;
    return {queue_->space, buffer.offset, queue_->bytes, index};
  }

  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    twin::Core& core = begin("FreeTensor");
    detail::Queue::Buffer& buffer = own(tensor, detail::Queue::kTaken, "a tensor is freed that nobody holds");
    buffer.emptied = core.take_event(queue_->consumer, queue_->producer);
    core.set_flag(queue_->consumer, queue_->producer, buffer.emptied);
    buffer.state = detail::Queue::kFree;
    queue_->free.push_back(tensor.buffer());
  }

 private:
  friend class AscendC::TPipe;

  twin::Core& begin(const char* name) const {
    twin::core().name_instruction(name);
    if (!queue_) twin::core().fail("the queue has no buffers");
    return twin::core();
  }
  static int take(std::deque<int>& list) {
    const int first = list.front();
    list.pop_front();
    return first;
  }
  template <typename T>
  detail::Queue::Buffer& own(const LocalTensor<T>& tensor, detail::Queue::State state, const char* message) {
    const int index = tensor.buffer();
    const bool ours = index >= 0 && index < int(queue_->buffers.size()) && tensor.space() == queue_->space &&
                      queue_->buffers[index].offset == tensor.offset();
    if (!ours) twin::core().fail("the tensor does not belong to this queue");
    if (queue_->buffers[index].state != state) twin::core().fail(message);
    return queue_->buffers[index];
  }

  std::shared_ptr<detail::Queue> queue_;
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
  LocalTensor<T> Get() const { return {detail::space_of(position), offset_, bytes_}; }
  template <typename T>
  LocalTensor<T> Get(uint32_t elements) const {
    if (elements * sizeof(T) > bytes_) twin::core().fail("more elements than the buffer has");
    return {detail::space_of(position), offset_, elements * sizeof(T)};
  }

 private:
  friend class TPipe;
  size_t offset_ = 0, bytes_ = 0;
};

class TPipe {
 public:
  // On a cube core it sets three flags of its own, which nobody else may use.
  TPipe() {
    for (int event = 0; event < own_events(); ++event)
      twin::core().set_flag(twin::kM, twin::kMTE1, twin::core().take_event(twin::kM, twin::kMTE1));
  }
  TPipe(const TPipe&) = delete;
  ~TPipe() noexcept(false) {
    if (std::uncaught_exceptions() > 0) return;
    for (int event = 0; event < own_events(); ++event) twin::core().wait_flag(twin::kM, twin::kMTE1, event);
    for (const auto& queue : queues_) queue->finish();
  }

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
    twin::core().name_instruction("InitBuffer");
    buffer.offset_ = twin::core().take_buffer(detail::space_of(position), bytes);
    buffer.bytes_ = (bytes + 31) / 32 * 32;
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
  static int own_events() { return twin::core().kind() == twin::Kind::cube ? 3 : 0; }

  bool make(detail::QueueBase& queue, twin::Space space, std::pair<twin::Pipe, twin::Pipe> ends, uint8_t count,
            uint32_t bytes) {
    twin::Core& core = twin::core();
    core.name_instruction("InitBuffer");
    auto made = std::make_shared<detail::Queue>();
    made->space = space;
    made->producer = ends.first;
    made->consumer = ends.second;
    made->bytes = (bytes + 31) / 32 * 32;
    for (int i = 0; i < count; ++i) {
      made->buffers.push_back({core.take_buffer(space, bytes)});
      made->free.push_back(i);
    }
    queue.queue_ = made;
    queues_.push_back(made);
    return true;
  }

  std::vector<std::shared_ptr<detail::Queue>> queues_;
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
