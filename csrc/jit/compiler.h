// A compiler of kernels behind one interface. For CUDA, NVRTC is preferred, since torch's own wheels bring it; nvcc on
// request (DEEPINFER_JIT_COMPILER=nvcc) or where there is no NVRTC. For Ascend it is bisheng.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace deepinfer::jit {

struct CompileJob {
  std::string name;                // of the kernel, for messages
  std::string text;                // the generated source
  std::string arch;                // "sm_90a", "dav-2201"
  std::vector<std::string> flags;  // all that decide the result, and no path
  std::string source_root;         // the include path of the kernel headers
};

struct Compiled {
  std::string binary;
  std::string log;  // warnings
};

class Compiler {
 public:
  virtual ~Compiler() = default;

  // Part of the cache key: kind and version of this build of the compiler. Holds no path.
  const std::string& identity() const { return identity_; }
  const std::string& path() const { return path_; }

  virtual std::vector<std::string> flags(const std::string& arch) const = 0;
  // The same thing as a shell command, for messages and manifests.
  virtual std::string command(const CompileJob& job) const = 0;
  // Throws std::runtime_error with the compiler's own message.
  virtual Compiled compile(const CompileJob& job) const = 0;

 protected:
  Compiler(std::string identity, std::string path) : identity_(std::move(identity)), path_(std::move(path)) {}

 private:
  std::string identity_, path_;
};

// Ascend architectures are written dav-2201 (910B, A2, A3) or dav-3510 (950).
bool is_ascend(const std::string& arch);

// The compilers of this process, found on first use. Throw std::runtime_error saying what is missing and how to get it.
std::shared_ptr<const Compiler> cuda_compiler();
std::shared_ptr<const Compiler> ascend_compiler();

// Further folders in which Python packages are installed, as NVRTC may be. torch's own is known.
void add_package_folders(const std::vector<std::string>& folders);

// Where they are found; null when they are not. Each place looked at is appended to `tried`, a line each.
std::shared_ptr<const Compiler> find_nvrtc(const std::vector<std::string>& package_folders, std::string& tried);
std::shared_ptr<const Compiler> find_nvcc(std::string& tried);
std::shared_ptr<const Compiler> find_bisheng(std::string& tried);

// The failure of a compilation: kernel, compiler, its message, the command.
[[noreturn]] void throw_compile_error(const Compiler& compiler, const CompileJob& job, const std::string& message);

}  // namespace deepinfer::jit
