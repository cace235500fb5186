// A host model of one Ascend AI core at the level of its public programming documents: memories on the core, pipes that
// run beside each other, flags and barriers that order them. It executes kernels and says what a real core would not:
// which two accesses nothing orders, which bytes nobody wrote, which limit an instruction exceeds.
//
// Order: each pipe carries a vector clock, the newest instruction of every pipe that it knows to be complete. A flag
// hands the setter's knowledge to the waiter, a barrier completes the pipe's own instructions. Each byte of memory on the
// core remembers its last writer and its last reader on each pipe; an access that does not know these to be complete is
// a fault, whatever the values are.
//
// Values: copies between memories and products of matrices run as late as the flags permit, so a missing flag also shows
// as wrong numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "ledger.h"

namespace twin {

enum Pipe : int { kS, kV, kM, kMTE1, kMTE2, kMTE3, kFix, kPipes };
const char* name_of(Pipe pipe);

enum Space : int { kUB, kL1, kL0A, kL0B, kL0C, kSpaces };

// Matrix and vector cores are apart: each has pipes that the other lacks.
enum class Kind : int { vector, cube };

struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

// Public figures of a chip.
struct Arch {
  int number;  // 2201 or 3510
  std::array<size_t, kSpaces> bytes;
};
const Arch& arch(int number);

struct Options {
  bool autosync = false;  // the compiler adds the barriers within the vector pipe, as it does by default
  bool races = true;      // false: only values can betray a missing flag
  uint64_t seed = 0;      // of the order in which cores run
};
Options options_from_environment();

constexpr int kEvents = 8;
constexpr int kMaxBlocks = 65535;
constexpr int kMaxBuffers = 64;

// What a core did: the raw material of an estimate, no time.
struct Work {
  int64_t vectors = 0, vector_repeats = 0;  // vector instructions, and the units of 256 bytes that they process
  int64_t copies = 0, copied_bytes = 0;     // to and from global memory
  int64_t scalars = 0;                      // accesses of memory by the scalar unit
  int64_t products = 0, fractals = 0;       // Mmad instructions, and the products of fractals in them
  int64_t loads = 0, loaded_bytes = 0;      // to the operands of the matrix unit
};

// Of up to 2^16 pieces, all counts in bytes. One side is global memory.
struct Copy {
  bool to_global;
  Space space;
  char* global;
  size_t local;
  int64_t pieces, length, global_step, local_step;
  int64_t pad_left = 0, pad_right = 0;  // bytes written beside each piece on the core: with `fill`, or undefined
  int fill_size = 0;                    // bytes of a padding value; 0: undefined
  uint64_t fill = 0;
};

// A piece of device memory: where kernels see it, and where the model reads and writes it.
struct Range {
  const char* address;
  size_t bytes;
  char* memory;
};

// Global memory as all cores of a launch see it.
class Global {
 public:
  // The memory of `bytes` bytes; nullptr if they are not all in one range.
  char* memory(const char* address, size_t bytes) const;

  struct Record {
    int32_t writer = -1, reader = -1;  // cores; kMany: several readers
    uint32_t write_tick = 0, read_tick = 0;
    int8_t write_pipe = 0, read_pipe = 0;
    bool operator==(const Record&) const = default;
  };
  static constexpr int32_t kMany = -2;
  static constexpr uintptr_t kPage = 4096;
  Ledger<Record>& page_of(uintptr_t address);  // of kPage bytes, the first at a multiple of kPage
  void start(std::vector<Range> ranges);       // of a launch, in the order of their addresses

 private:
  struct Page {
    uint64_t launch = 0;
    Ledger<Record> bytes;
  };
  std::vector<Range> ranges_;
  std::unordered_map<uintptr_t, Page> pages_;
  uint64_t launch_ = 0;
};

class Core {
 public:
  Core(const Arch& arch, Global& global) : arch_(arch), global_(global) {}

  Work& work() { return work_; }
  void start(Kind kind, const Options& options, int index, int count);  // a kernel on core `index` of `count`
  void finish();                     // checks what must hold at its end

  [[noreturn]] void fail(const std::string& message) const;

  // An instruction begins: its name is for messages.
  uint32_t issue(Pipe pipe, const char* name);
  // `any`: a read that takes bytes which nobody wrote along.
  void access(Pipe pipe, uint32_t tick, Space space, size_t offset, size_t bytes, bool write, bool any = false);
  void mark_undefined(Space space, size_t offset, size_t bytes);
  bool is_defined(Space space, size_t offset, size_t bytes);
  void access_global(Pipe pipe, uint32_t tick, const char* address, size_t bytes, bool write);
  char* global_memory(const char* address, size_t bytes) const;
  void copy(Pipe pipe, const char* name, const Copy& copy);
  // What the instruction does to memory, for when somebody waits for it.
  void defer(Pipe pipe, uint32_t tick, std::function<void()> effect) { pending_[pipe].push_back({tick, std::move(effect)}); }
  // The hardware itself keeps the pipe's next instruction behind those before it.
  void follow(Pipe pipe) { clocks_[pipe][pipe] = ticks_[pipe]; }

  void set_flag(Pipe from, Pipe to, int event);
  void wait_flag(Pipe from, Pipe to, int event);
  void barrier(Pipe pipe);
  void barrier_all();
  int take_event(Pipe from, Pipe to);
  void release_event(Pipe from, Pipe to, int event);

  size_t take_buffer(Space space, size_t bytes);  // space on the core, never given back within a kernel
  char* data(Space space) { return memories_[space].bytes.data(); }
  size_t capacity(Space space) const { return arch_.bytes[space]; }

  const Arch& arch() const { return arch_; }
  Kind kind() const { return kind_; }
  int index() const { return index_; }
  int count() const { return count_; }
  void name_instruction(const char* name) { instruction_ = name; }

 private:
  static constexpr int kSlots = 4;  // pipes that can reach one memory
  static int slot(Pipe pipe);

  enum Content : uint8_t { kNever, kDefined, kUndefined };
  struct Record {
    uint32_t write_tick = 0;
    std::array<uint32_t, kSlots> read_tick = {};
    int8_t writer = -1;
    Content content = kNever;
    bool operator==(const Record&) const = default;
  };

  struct Memory {
    std::vector<char> bytes;
    Ledger<Record> records;
    size_t taken = 0, touched = 0;
  };
  using Clock = std::array<uint32_t, kPipes>;
  struct Pending {
    uint32_t tick;
    std::function<void()> effect;
  };
  using Event = std::tuple<int, int, int>;

  bool knows(Pipe pipe, Pipe other, uint32_t tick) const { return clocks_[pipe][other] >= tick; }
  void learn(Pipe pipe, const Clock& clock);
  void complete(Pipe pipe, uint32_t tick);
  void move(const Copy& copy);
  void check_event(int event) const;

  const Arch& arch_;
  Kind kind_ = Kind::vector;
  Options options_;
  Work work_;
  Global& global_;
  std::array<Memory, kSpaces> memories_;
  std::array<Clock, kPipes> clocks_;
  std::array<uint32_t, kPipes> ticks_;
  std::array<std::deque<Pending>, kPipes> pending_;
  std::map<Event, Clock> flags_;
  std::map<Event, bool> taken_events_;
  const char* instruction_ = "";
  int index_ = 0, count_ = 1, buffers_ = 0;
};

// The core that the running kernel is on.
Core& core();

// Runs `kernel(data)` on `blocks` cores, one after the other in an order drawn from the seed. The kernel may touch the
// given ranges of memory, which are in the order of their addresses. Returns what went wrong first, or an empty string; `busiest` is the work of the core that did
// most of each kind.
std::string launch(int arch_number, Kind kind, int blocks, const Options& options,
                   std::vector<Range> ranges, void (*kernel)(const void*), const void* data, Work& busiest);

}  // namespace twin
