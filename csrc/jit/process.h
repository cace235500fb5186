// Programs that are started and waited for: compilers.
#pragma once

#include <string>
#include <vector>

namespace deepinfer::jit {

// Under TMPDIR or /tmp, removed with all that is in it. `path` is empty if there could be none.
struct TemporaryDirectory {
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string path;
};

struct Finished {
  int status = 0;  // of the shell's kind: 128 + signal for a killed process
  std::string output;
};

// Runs a program to its end and collects what it prints. Started directly, not through a shell, so that paths may hold
// anything.
Finished run(const std::vector<std::string>& command);

// The command as one would type it.
std::string joined(const std::vector<std::string>& command);

}  // namespace deepinfer::jit
