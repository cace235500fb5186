#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

namespace twin {

namespace {

thread_local Core* current = nullptr;

constexpr char kPoison = char(0xa7);

std::string pair_of(Pipe from, Pipe to, int event) {
  return std::string(name_of(from)) + " to " + name_of(to) + ", event " + std::to_string(event);
}

constexpr size_t kKiB = 1024;

}  // namespace

const char* name_of(Pipe pipe) {
  constexpr const char* kNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
  return kNames[pipe];
}

// 2201: of 192 KB, 256 bytes and, unless a flag says otherwise, 8 KB are reserved. 3510: 8 KB of 256 KB.
const Arch& arch(int number) {
  static const Arch known[] = {
      {2201, {192 * kKiB - 256 - 8 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB}},
      {3510, {248 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 256 * kKiB}},
  };
  for (const Arch& arch : known)
    if (arch.number == number) return arch;
  throw Fault("there is no model of the architecture " + std::to_string(number));
}

Options options_from_environment() {
  Options options;
  const char* mode = std::getenv("DEEPINFER_TWIN_MODE");
  const std::string text = mode ? mode : "strict";
  if (text == "autosync") options.autosync = true;
  else if (text == "values") options.races = false;
  else if (text != "strict") throw Fault("DEEPINFER_TWIN_MODE must be strict, autosync or values, got " + text);
  const char* seed = std::getenv("DEEPINFER_TWIN_SEED");
  options.seed = seed ? std::strtoull(seed, nullptr, 10) : 0;
  return options;
}

char* Global::memory(const char* address, size_t bytes) const {
  const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                     [](const char* at, const Range& range) { return at < range.address; });
  if (next == ranges_.begin()) return nullptr;
  const Range& range = next[-1];
  const size_t offset = size_t(address - range.address);
  return offset + bytes <= range.bytes ? range.memory + offset : nullptr;
}

Ledger<Global::Record>& Global::page_of(uintptr_t address) {
  Page& page = pages_[address / kPage];
  if (page.bytes.empty()) page.bytes.resize(kPage);
  if (page.launch != launch_) {
    page.launch = launch_;
    page.bytes.clear(kPage);
  }
  return page.bytes;
}

void Global::start(std::vector<Range> ranges) {
  constexpr size_t kKept = 4096;
  if (pages_.size() > kKept) pages_.clear();
  ranges_ = std::move(ranges);
  ++launch_;
}

void Core::start(Kind kind, const Options& options, int index, int count) {
  kind_ = kind;
  options_ = options;
  work_ = Work{};
  index_ = index;
  count_ = count;
  buffers_ = 0;
  instruction_ = "start of kernel";
  for (Memory& memory : memories_) {
    std::fill_n(memory.bytes.begin(), memory.touched, kPoison);
    memory.records.clear(memory.touched);
    memory.taken = memory.touched = 0;
  }
  for (Clock& clock : clocks_) clock.fill(0);
  ticks_.fill(0);
  for (auto& queue : pending_) queue.clear();
  flags_.clear();
  taken_events_.clear();
}

void Core::finish() {
  instruction_ = "end of kernel";
  for (int pipe = 0; pipe < kPipes; ++pipe) complete(Pipe(pipe), ticks_[pipe]);
  for (const auto& [event, clock] : flags_)
    fail("a flag was set and never waited for: " +
         pair_of(Pipe(std::get<0>(event)), Pipe(std::get<1>(event)), std::get<2>(event)));
}

void Core::fail(const std::string& message) const {
  throw Fault("core " + std::to_string(index_) + ", " + instruction_ + ": " + message);
}

int Core::slot(Pipe pipe) {
  constexpr int kSlotOf[] = {0, 1, 0, 1, 2, 3, 2};
  return kSlotOf[pipe];
}

void Core::learn(Pipe pipe, const Clock& clock) {
  for (int p = 0; p < kPipes; ++p) clocks_[pipe][p] = std::max(clocks_[pipe][p], clock[p]);
}

// The scalar unit issues all instructions in program order, so what it has waited for is over for every pipe; its own
// accesses of memory on the core are not.
uint32_t Core::issue(Pipe pipe, const char* name) {
  instruction_ = name;
  const bool belongs = kind_ == Kind::cube ? pipe != kV && pipe != kMTE3 : pipe != kM && pipe != kMTE1 && pipe != kFix;
  if (!belongs) fail(std::string("this core has no pipe ") + name_of(pipe));
  if (pipe == kS) ++work_.scalars;
  if (pipe == kV) ++work_.vectors;
  if (pipe == kS) {
    clocks_[kS][kS] = ticks_[kS];
  } else {
    const uint32_t own = clocks_[pipe][kS];
    learn(pipe, clocks_[kS]);
    clocks_[pipe][kS] = own;
    if (pipe == kV && options_.autosync) clocks_[kV][kV] = ticks_[kV];
  }
  return ++ticks_[pipe];
}

void Core::access(Pipe pipe, uint32_t tick, Space space, size_t offset, size_t bytes, bool write, bool any) {
  Memory& memory = memories_[space];
  if (offset + bytes > memory.bytes.size())
    fail("an access of bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of a memory of " +
         std::to_string(memory.bytes.size()));
  memory.touched = std::max(memory.touched, offset + bytes);
  const int own = slot(pipe);
  // Knowledge by slot: which tick of each pipe that reaches this memory is over. An instruction may touch a byte twice.
  std::array<uint32_t, kSlots> known = {};
  std::array<Pipe, kSlots> pipes = {};
  const auto reaches = [&](int p) {
    if (space == kUB) return p == kS || p == kV || p == kMTE2 || p == kMTE3;
    if (space == kL1) return p == kMTE1 || p == kMTE2 || p == kMTE3;
    if (space == kL0C) return p == kM || p == kFix;
    return p == kM || p == kMTE1;
  };
  for (int p = 0; p < kPipes; ++p)
    if (reaches(p)) {
      known[slot(Pipe(p))] = clocks_[pipe][p];
      pipes[slot(Pipe(p))] = Pipe(p);
    }
  const auto unordered = [&](size_t byte, const char* what, int other, const char* access) {
    fail(std::string(what) + " of byte " + std::to_string(byte) + " on pipe " + name_of(pipe) +
         " is not ordered after a " + access + " on pipe " + name_of(pipes[other]));
  };
  memory.records.visit(offset, offset + bytes, [&](Record& record, size_t byte) {
    if (!write && !any && record.content != kDefined)
      fail("a read of byte " + std::to_string(byte) +
           (record.content == kNever ? " that nothing has written" : ", undefined padding"));
    if (options_.races && record.writer >= 0 && record.write_tick > known[record.writer] &&
        !(record.writer == own && record.write_tick == tick))
      unordered(byte, write ? "a write" : "a read", record.writer, "write");
    if (!write) {
      record.read_tick[own] = tick;
      return;
    }
    if (options_.races)
      for (int other = 0; other < kSlots; ++other)
        if (record.read_tick[other] > known[other] && !(other == own && record.read_tick[other] == tick))
          unordered(byte, "a write", other, "read");
    record = Record{};
    record.writer = int8_t(own);
    record.write_tick = tick;
    record.content = kDefined;
  });
}

void Core::mark_undefined(Space space, size_t offset, size_t bytes) {
  Memory& memory = memories_[space];
  memory.records.visit(offset, offset + bytes, [](Record& record, size_t) { record.content = kUndefined; });
  std::fill_n(memory.bytes.begin() + ptrdiff_t(offset), bytes, kPoison);
}

bool Core::is_defined(Space space, size_t offset, size_t bytes) {
  bool defined = true;
  memories_[space].records.visit(offset, offset + bytes,
                                 [&](const Record& record, size_t) { defined &= record.content == kDefined; });
  return defined;
}

void Core::access_global(Pipe pipe, uint32_t tick, const char* address, size_t bytes, bool write) {
  global_memory(address, bytes);
  const auto check = [&](Global::Record& record, size_t byte) {
    const auto where = [&] { return " of byte " + std::to_string(byte) + " of a piece in global memory"; };
    if (record.writer >= 0 && record.writer != index_)
      fail(std::string(write ? "a write" : "a read") + where() + ", which core " + std::to_string(record.writer) +
           " has written");
    if (options_.races && record.writer == index_ && !knows(pipe, Pipe(record.write_pipe), record.write_tick) &&
        !(record.write_pipe == pipe && record.write_tick == tick))
      fail(std::string(write ? "a write" : "a read") + where() + " is not ordered after its write on pipe " +
           name_of(Pipe(record.write_pipe)));
    if (write) {
      if (record.reader == Global::kMany || (record.reader >= 0 && record.reader != index_))
        fail("a write" + where() + ", which another core has read");
      if (options_.races && record.reader == index_ && !knows(pipe, Pipe(record.read_pipe), record.read_tick))
        fail("a write" + where() + " is not ordered after its read on pipe " + name_of(Pipe(record.read_pipe)));
      record.writer = index_;
      record.write_tick = tick;
      record.write_pipe = int8_t(pipe);
    } else {
      record.reader = record.reader == -1 || record.reader == index_ ? index_ : Global::kMany;
      record.read_tick = tick;
      record.read_pipe = int8_t(pipe);
    }
  };
  for (size_t done = 0; done < bytes;) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address) + done;
    const size_t begin = at % Global::kPage, size = std::min(bytes - done, Global::kPage - begin);
    global_.page_of(at).visit(begin, begin + size,
                              [&](Global::Record& record, size_t byte) { check(record, done + byte - begin); });
    done += size;
  }
}

char* Core::global_memory(const char* address, size_t bytes) const {
  char* const memory = global_.memory(address, bytes);
  if (!memory && bytes > 0) fail("an access outside of all device memory");
  return memory;
}

void Core::copy(Pipe pipe, const char* name, const Copy& copy) {
  const uint32_t tick = issue(pipe, name);
  ++work_.copies;
  work_.copied_bytes += copy.pieces * copy.length;
  for (int64_t i = 0; i < copy.pieces; ++i) {
    const size_t local = copy.local + size_t(i * copy.local_step);
    const size_t bytes = size_t(copy.pad_left + copy.length + copy.pad_right);
    access_global(pipe, tick, copy.global + i * copy.global_step, size_t(copy.length), copy.to_global);
    access(pipe, tick, copy.space, local, copy.to_global ? size_t(copy.length) : bytes, !copy.to_global);
    if (!copy.to_global && copy.fill_size == 0) {
      mark_undefined(copy.space, local, size_t(copy.pad_left));
      mark_undefined(copy.space, local + size_t(copy.pad_left + copy.length), size_t(copy.pad_right));
    }
  }
  defer(pipe, tick, [this, copy] { move(copy); });
}

void Core::complete(Pipe pipe, uint32_t tick) {
  auto& queue = pending_[pipe];
  while (!queue.empty() && queue.front().tick <= tick) {
    queue.front().effect();
    queue.pop_front();
  }
}

void Core::move(const Copy& copy) {
  char* bytes = data(copy.space);
  for (int64_t i = 0; i < copy.pieces; ++i) {
    char* global = global_memory(copy.global + i * copy.global_step, size_t(copy.length));
    char* local = bytes + copy.local + i * copy.local_step;
    if (copy.to_global) {
      std::memcpy(global, local, size_t(copy.length));
      continue;
    }
    char* begin = local + copy.pad_left;
    std::memcpy(begin, global, size_t(copy.length));
    if (copy.fill_size == 0) continue;
    const auto fill = [&](char* from, char* to) {
      for (; from + copy.fill_size <= to; from += copy.fill_size) std::memcpy(from, &copy.fill, size_t(copy.fill_size));
    };
    fill(local, begin);
    fill(begin + copy.length, begin + copy.length + copy.pad_right);
  }
}

void Core::check_event(int event) const {
  if (event < 0 || event >= kEvents)
    fail("event ids are 0 to " + std::to_string(kEvents - 1) + ", got " + std::to_string(event));
}

void Core::set_flag(Pipe from, Pipe to, int event) {
  check_event(event);
  Clock clock = clocks_[from];
  clock[from] = ticks_[from];
  if (!flags_.emplace(Event{from, to, event}, clock).second)
    fail("a flag is set twice without a wait: " + pair_of(from, to, event));
}

void Core::wait_flag(Pipe from, Pipe to, int event) {
  check_event(event);
  const auto flag = flags_.find(Event{from, to, event});
  if (flag == flags_.end()) fail("would wait for ever, no flag is set: " + pair_of(from, to, event));
  for (int pipe = 0; pipe < kPipes; ++pipe) complete(Pipe(pipe), flag->second[pipe]);
  learn(to, flag->second);
  flags_.erase(flag);
}

void Core::barrier(Pipe pipe) {
  clocks_[pipe][pipe] = ticks_[pipe];
  complete(pipe, ticks_[pipe]);
}

void Core::barrier_all() {
  for (int pipe = 0; pipe < kPipes; ++pipe) complete(Pipe(pipe), ticks_[pipe]);
  for (Clock& clock : clocks_) clock = ticks_;
}

int Core::take_event(Pipe from, Pipe to) {
  for (int event = 0; event < kEvents; ++event)
    if (taken_events_.emplace(Event{from, to, event}, true).second) return event;
  fail("all " + std::to_string(kEvents) + " events are taken from " + name_of(from) + " to " + name_of(to));
}

void Core::release_event(Pipe from, Pipe to, int event) {
  if (taken_events_.erase(Event{from, to, event}) == 0) fail("an event is released that nobody took");
}

size_t Core::take_buffer(Space space, size_t bytes) {
  Memory& memory = memories_[space];
  if (memory.bytes.empty()) {
    memory.bytes.resize(arch_.bytes[space], kPoison);
    memory.records.resize(arch_.bytes[space]);
  }
  bytes = (bytes + 31) / 32 * 32;
  if (bytes == 0) fail("a buffer of 0 bytes");
  if (++buffers_ > kMaxBuffers) fail("more than " + std::to_string(kMaxBuffers) + " buffers");
  if (memory.taken + bytes > memory.bytes.size())
    fail("the buffers take " + std::to_string(memory.taken + bytes) + " bytes, the memory has " +
         std::to_string(memory.bytes.size()));
  memory.taken += bytes;
  return memory.taken - bytes;
}

Core& core() {
  if (!current) throw Fault("no kernel is running");
  return *current;
}

std::string launch(int arch_number, Kind kind, int blocks, const Options& options,
                   std::vector<Range> ranges, void (*kernel)(const void*), const void* data, Work& busiest) {
  if (blocks < 1 || blocks > kMaxBlocks) return "a launch of " + std::to_string(blocks) + " blocks";
  std::vector<int> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));
  static thread_local Global global;  // both are large: kept from launch to launch
  static thread_local std::map<int, std::unique_ptr<Core>> cores;
  global.start(std::move(ranges));
  std::string fault;
  try {
    std::unique_ptr<Core>& core = cores[arch_number];
    if (!core) core = std::make_unique<Core>(arch(arch_number), global);
    current = core.get();
    for (int index : order) {
      core->start(kind, options, index, blocks);
      kernel(data);
      core->finish();
      for (int64_t Work::*of : {&Work::vectors, &Work::vector_repeats, &Work::copies, &Work::copied_bytes, &Work::scalars,
                                &Work::products, &Work::fractals, &Work::loads, &Work::loaded_bytes})
        busiest.*of = std::max(busiest.*of, core->work().*of);
    }
  } catch (const Fault& error) {
    fault = error.what();
  }
  current = nullptr;
  return fault;
}

}  // namespace twin
