#include "compiler.h"

#include <pthread.h>

#include <mutex>
#include <stdexcept>

#include "files.h"

namespace deepinfer::jit {

namespace {

struct State {
  std::mutex mutex;
  std::vector<std::string> package_folders;
  std::shared_ptr<const Compiler> chosen, ascend;
};

// A forked child starts afresh, as in build.cpp: the mutex may have been held, and NVRTC in the middle of something.
State* state = new State;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  auto fresh = new State;
  fresh->package_folders = state->package_folders;
  state = fresh;
});

[[noreturn]] void throw_no_compiler(const std::string& wanted, const std::string& tried) {
  throw std::runtime_error(
      "torch_deepinfer compiles its CUDA kernels at run time and found no " + wanted +
      ". torch's CUDA wheels bring NVRTC along; otherwise: pip install nvidia-cuda-nvrtc (the major version of torch's "
      "CUDA), or install the CUDA toolkit and set CUDA_HOME. Looked at:\n" +
      tried);
}

}  // namespace

void add_package_folders(const std::vector<std::string>& folders) {
  std::lock_guard lock(state->mutex);
  state->package_folders.insert(state->package_folders.end(), folders.begin(), folders.end());
}

std::shared_ptr<const Compiler> cuda_compiler() {
  std::lock_guard lock(state->mutex);
  if (state->chosen) return state->chosen;
  const std::string wanted = environment("DEEPINFER_JIT_COMPILER");
  if (!wanted.empty() && wanted != "nvrtc" && wanted != "nvcc")
    throw std::invalid_argument("DEEPINFER_JIT_COMPILER must be nvrtc or nvcc, got " + wanted);
  std::string tried;
  std::shared_ptr<const Compiler> found;
  if (wanted != "nvcc") found = find_nvrtc(state->package_folders, tried);
  if (!found && wanted != "nvrtc") found = find_nvcc(tried);
  if (!found) throw_no_compiler(wanted.empty() ? "NVRTC and no nvcc" : wanted == "nvcc" ? "nvcc" : "NVRTC", tried);
  return state->chosen = found;
}

bool is_ascend(const std::string& arch) { return arch.starts_with("dav-"); }

std::shared_ptr<const Compiler> ascend_compiler() {
  std::lock_guard lock(state->mutex);
  if (state->ascend) return state->ascend;
  std::string tried;
  state->ascend = find_bisheng(tried);
  if (!state->ascend)
    throw std::runtime_error(
        "torch_deepinfer compiles its NPU kernels at run time and found no bisheng. It comes with the CANN toolkit: "
        "install that and source its set_env.sh, or set DEEPINFER_BISHENG. Looked at:\n" +
        tried);
  return state->ascend;
}

void throw_compile_error(const Compiler& compiler, const CompileJob& job, const std::string& message) {
  throw std::runtime_error("compiling the kernel " + job.name + " for " + job.arch + " with " + compiler.identity() +
                           " failed:\n" + message + "\ncommand: " + compiler.command(job) + "\nsource:\n" + job.text);
}

}  // namespace deepinfer::jit
