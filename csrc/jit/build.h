// From a kernel's source to its machine code: out of this process's memory, out of the cache on disk, or compiled now.
#pragma once

#include <memory>
#include <string>

#include "source.h"

namespace deepinfer::jit {

enum class Origin { memory, disk, compiled };

struct Binary {
  std::string bytes;
  std::string path;      // the cache entry, or empty when no cache root can be written
  std::string log;       // the compiler's warnings, when it was compiled in this process
  double seconds = 0;    // that took
};

struct Built {
  std::shared_ptr<const Binary> binary;
  Origin origin;
};

// Thread-safe; threads and processes that want the same kernel at once share one compilation. `extra_flags` are for
// tools. Throws std::runtime_error: no compiler, unknown architecture, or a kernel that does not compile.
Built build(const std::string& name, const std::string& text, const std::string& arch,
            const std::string& extra_flags = "");

}  // namespace deepinfer::jit
