#include "tensor.h"

#include <deque>
#include <exception>
#include <string>

namespace AscendC {

namespace detail {

using twin::core;

Place skip(const Place& place, uint32_t elements, size_t item) {
  const size_t skipped = size_t(elements) * item;
  if (skipped > place.bytes) core().fail("an offset of " + std::to_string(elements) + " elements, past the tensor");
  return {place.space, place.offset + skipped, place.bytes - skipped, place.buffer};
}

void require(const Place& place, size_t bytes, size_t alignment) {
  if (place.offset % alignment)
    core().fail("the address " + std::to_string(place.offset) + " is not a multiple of " + std::to_string(alignment));
  if (bytes > place.bytes)
    core().fail(std::to_string(bytes) + " bytes of a tensor that has " + std::to_string(place.bytes));
}

char* scalar(const Place& place, const char* name, uint32_t index, size_t item, bool write) {
  const uint32_t tick = core().issue(twin::kS, name);
  require(place, (size_t(index) + 1) * item, item);
  const size_t at = place.offset + index * item;
  core().access(twin::kS, tick, place.space, at, item, write);
  return core().data(place.space) + at;
}

const char* scalar(const char* data, uint64_t bytes, uint64_t offset, size_t item) {
  const uint32_t tick = core().issue(twin::kS, "GetValue of global memory");
  require_global(bytes, offset, item);
  core().access_global(twin::kS, tick, data + offset, item, false);
  return core().global_memory(data + offset, item);
}

void require_global(uint64_t bytes, uint64_t offset, uint64_t count) {
  if (offset + count > bytes)
    core().fail("bytes " + std::to_string(offset) + " to " + std::to_string(offset + count) + " of a buffer of " +
                std::to_string(bytes) + " bytes in global memory");
}

void require_elements(uint64_t elements, uint64_t offset) {
  if (offset > elements)
    core().fail("an offset of " + std::to_string(offset) + " elements into a buffer of " + std::to_string(elements));
}

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

  Place place(int index) const { return {space, buffers[size_t(index)].offset, bytes, index}; }

  Buffer& own(const Place& tensor, State state, const char* message) {
    const bool ours = tensor.buffer >= 0 && tensor.buffer < int(buffers.size()) && tensor.space == space &&
                      buffers[size_t(tensor.buffer)].offset == tensor.offset;
    if (!ours) core().fail("the tensor does not belong to this queue");
    Buffer& buffer = buffers[size_t(tensor.buffer)];
    if (buffer.state != state) core().fail(message);
    return buffer;
  }

  void finish() const {
    core().name_instruction("end of kernel");
    for (const Buffer& buffer : buffers) {
      if (buffer.state != kFree) core().fail("a tensor of a queue was never freed");
      if (buffer.emptied >= 0) core().wait_flag(consumer, producer, buffer.emptied);
    }
  }
};

namespace {

Queue& begin(Queue* queue, const char* name) {
  core().name_instruction(name);
  if (!queue) core().fail("the queue has no buffers");
  return *queue;
}

int take(std::deque<int>& list) {
  const int first = list.front();
  list.pop_front();
  return first;
}

}  // namespace

Place QueueBase::allocate() {
  Queue& queue = begin(queue_, "AllocTensor");
  if (queue.free.empty()) core().fail("the queue has no free buffer");
  const int index = take(queue.free);
  Queue::Buffer& buffer = queue.buffers[size_t(index)];
  if (buffer.emptied >= 0) {
    core().wait_flag(queue.consumer, queue.producer, buffer.emptied);
    core().release_event(queue.consumer, queue.producer, buffer.emptied);
    buffer.emptied = -1;
  }
  buffer.state = Queue::kAllocated;
  return queue.place(index);
}

bool QueueBase::enqueue(const Place& tensor) {
  Queue& queue = begin(queue_, "EnQue");
  Queue::Buffer& buffer = queue.own(tensor, Queue::kAllocated, "EnQue of a tensor that is not allocated");
  buffer.filled = core().take_event(queue.producer, queue.consumer);
  core().set_flag(queue.producer, queue.consumer, buffer.filled);
  buffer.state = Queue::kQueued;
  queue.ready.push_back(tensor.buffer);
  return true;
}

Place QueueBase::dequeue() {
  Queue& queue = begin(queue_, "DeQue");
  if (queue.ready.empty()) core().fail("the queue is empty");
  const int index = take(queue.ready);
  Queue::Buffer& buffer = queue.buffers[size_t(index)];
  core().wait_flag(queue.producer, queue.consumer, buffer.filled);
  core().release_event(queue.producer, queue.consumer, buffer.filled);
  buffer.state = Queue::kTaken;
  return queue.place(index);
}

void QueueBase::release(const Place& tensor) {
  Queue& queue = begin(queue_, "FreeTensor");
  Queue::Buffer& buffer = queue.own(tensor, Queue::kTaken, "a tensor is freed that nobody holds");
  buffer.emptied = core().take_event(queue.consumer, queue.producer);
  core().set_flag(queue.consumer, queue.producer, buffer.emptied);
  buffer.state = Queue::kFree;
  queue.free.push_back(tensor.buffer);
}

}  // namespace detail

namespace {

// On a cube core TPipe sets three flags of its own, which nobody else may use.
int own_events() { return twin::core().kind() == twin::Kind::cube ? 3 : 0; }

size_t whole_blocks(uint32_t bytes) { return (size_t(bytes) + 31) / 32 * 32; }

}  // namespace

TPipe::TPipe() {
  for (int event = 0; event < own_events(); ++event)
    twin::core().set_flag(twin::kM, twin::kMTE1, twin::core().take_event(twin::kM, twin::kMTE1));
}

TPipe::~TPipe() noexcept(false) {
  if (std::uncaught_exceptions() > 0) return;
  for (int event = 0; event < own_events(); ++event) twin::core().wait_flag(twin::kM, twin::kMTE1, event);
  for (const auto& queue : queues_) queue->finish();
}

Place TPipe::make(twin::Space space, uint32_t bytes) {
  twin::core().name_instruction("InitBuffer");
  const size_t offset = twin::core().take_buffer(space, bytes);
  return {space, offset, whole_blocks(bytes)};
}

bool TPipe::make(detail::QueueBase& queue, twin::Space space, std::pair<twin::Pipe, twin::Pipe> ends, uint8_t count,
                 uint32_t bytes) {
  auto made = std::make_unique<detail::Queue>();
  made->space = space;
  made->producer = ends.first;
  made->consumer = ends.second;
  made->bytes = whole_blocks(bytes);
  for (int i = 0; i < count; ++i) {
    made->buffers.push_back({make(space, bytes).offset});
    made->free.push_back(i);
  }
  queue.queue_ = made.get();
  queues_.push_back(std::move(made));
  return true;
}

}  // namespace AscendC
