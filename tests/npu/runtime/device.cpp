#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace standin {

namespace {

constexpr size_t kPage = 4096;

std::recursive_mutex mutex;
std::map<const char*, twin::Range> blocks;  // by their addresses
thread_local std::string message;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Asked each time: a forked test sets it for itself.
bool delayed() {
  const char* mode = std::getenv("DEEPINFER_STANDIN");
  return mode && std::string(mode) == "delayed";
}

}  // namespace

int report(Error code, const std::string& text) {
  message = text;
  return code;
}
const char* recent_message() { return message.c_str(); }

// The same pages twice: without any access at their device address, and where copies and kernels find them.
void* allocate(size_t bytes) {
  std::lock_guard lock(mutex);
  const size_t size = whole_pages(std::max<size_t>(bytes, 1));
  const int file = memfd_create("device memory", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void* address = MAP_FAILED;
  void* memory = MAP_FAILED;
  if (ftruncate(file, off_t(size)) == 0) {
    address = mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  }
  close(file);
  if (address == MAP_FAILED || memory == MAP_FAILED) return nullptr;
  const auto* begin = static_cast<const char*>(address);
  blocks[begin] = {begin, bytes, static_cast<char*>(memory)};
  return address;
}

bool release(void* address) {
  std::lock_guard lock(mutex);
  const auto block = blocks.find(static_cast<const char*>(address));
  if (block == blocks.end()) return false;
  const size_t size = whole_pages(std::max<size_t>(block->second.bytes, 1));
  munmap(address, size);
  munmap(block->second.memory, size);
  blocks.erase(block);
  return true;
}

std::vector<twin::Range> allocations() {
  std::lock_guard lock(mutex);
  std::vector<twin::Range> ranges;
  for (const auto& [address, range] : blocks) ranges.push_back(range);
  return ranges;
}

char* memory_at(const void* address) {
  std::lock_guard lock(mutex);
  const auto* at = static_cast<const char*>(address);
  auto block = blocks.upper_bound(at);
  if (block != blocks.begin()) {
    const twin::Range& range = std::prev(block)->second;
    if (size_t(at - range.address) < range.bytes) return range.memory + (at - range.address);
  }
  return const_cast<char*>(at);
}

struct Stream {
  std::deque<std::function<int()>> tasks;
  uint64_t done = 0;  // tasks that have run
  int error = 0;      // of the first that failed; stays
  std::string error_text;
  bool running = false;

  uint64_t end() const { return done + tasks.size(); }

  void run(uint64_t until) {
    if (running) return;  // a task that waits for its own stream
    running = true;
    while (done < until && !tasks.empty()) {
      const std::function<int()> task = std::move(tasks.front());
      tasks.pop_front();
      ++done;
      if (error) continue;
      error = task();
      if (error) error_text = message;
    }
    running = false;
  }
  int result() {
    if (error) message = error_text;
    const int code = error;
    error = 0;  // unlike a device, which would be lost: later tests go on
    return code;
  }
};

namespace {
std::set<Stream*> streams;
}

Stream* new_stream() {
  std::lock_guard lock(mutex);
  return *streams.insert(new Stream).first;
}

Stream* default_stream() {
  static Stream* const stream = new_stream();
  return stream;
}

void destroy(Stream* stream) {
  std::lock_guard lock(mutex);
  stream->run(stream->end());
  streams.erase(stream);
  delete stream;
}

int enqueue(Stream* stream, std::function<int()> task) {
  std::lock_guard lock(mutex);
  if (!stream) stream = default_stream();
  stream->tasks.push_back(std::move(task));
  return delayed() ? kOk : synchronize(stream);
}

int synchronize(Stream* stream) {
  std::lock_guard lock(mutex);
  if (!stream) stream = default_stream();
  stream->run(stream->end());
  return stream->result();
}

int synchronize_all() {
  std::lock_guard lock(mutex);
  int code = kOk;
  for (Stream* stream : streams) {
    const int error = synchronize(stream);
    if (error) code = error;
  }
  return code;
}

void record(Event* event, Stream* stream) {
  std::lock_guard lock(mutex);
  event->stream = stream ? stream : default_stream();
  event->position = event->stream->end();
}

int wait_for(const Event& event) {
  std::lock_guard lock(mutex);
  if (!event.stream || !streams.count(event.stream)) return kOk;
  event.stream->run(event.position);
  return event.stream->result();
}

int stream_waits(Stream* stream, Event event) {
  return enqueue(stream, [event] { return wait_for(event); });
}

const char* soc_name() {
  const char* name = std::getenv("DEEPINFER_STANDIN_SOC");
  return name ? name : "Ascend950PR_9599";
}

int arch_number() { return std::string(soc_name()).rfind("Ascend950", 0) == 0 ? 3510 : 2201; }

}  // namespace standin
