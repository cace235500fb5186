#include "device.h"

#include <sys/mman.h>

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
std::map<void*, size_t> blocks;
int opened = 0;
thread_local std::string message;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void protect(int protection) {
  for (const auto& [address, bytes] : blocks) mprotect(address, whole_pages(bytes), protection);
}

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

void* allocate(size_t bytes) {
  std::lock_guard lock(mutex);
  void* address = mmap(nullptr, whole_pages(bytes), opened ? PROT_READ | PROT_WRITE : PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  blocks[address] = bytes;
  return address;
}

bool release(void* address) {
  std::lock_guard lock(mutex);
  const auto block = blocks.find(address);
  if (block == blocks.end()) return false;
  munmap(address, whole_pages(block->second));
  blocks.erase(block);
  return true;
}

std::vector<std::pair<const void*, size_t>> allocations() {
  std::lock_guard lock(mutex);
  return {blocks.begin(), blocks.end()};
}

Open::Open() {
  mutex.lock();
  if (opened++ == 0) protect(PROT_READ | PROT_WRITE);
}
Open::~Open() {
  if (--opened == 0) protect(PROT_NONE);
  mutex.unlock();
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
