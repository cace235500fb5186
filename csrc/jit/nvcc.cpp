// nvcc of a CUDA toolkit.

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "compiler.h"
#include "files.h"
#include "process.h"

namespace deepinfer::jit {

namespace {

class Nvcc final : public Compiler {
 public:
  Nvcc(std::string identity, std::string path) : Compiler(std::move(identity), std::move(path)) {}

  std::vector<std::string> flags(const std::string& arch) const override {
    return {"-std=c++20", "-gencode", "arch=compute_" + arch.substr(3) + ",code=" + arch, "--fmad=false"};
  }

  std::string command(const CompileJob& job) const override {
    return joined(arguments(job, "kernel.cu", job.name + ".cubin"));
  }

  Compiled compile(const CompileJob& job) const override {
    TemporaryDirectory folder;
    const std::string source = folder.path + "/kernel.cu", target = folder.path + "/kernel.cubin";
    if (folder.path.empty() || !write_file(source, job.text))
      throw_compile_error(*this, job, "no temporary file could be written (" + std::string(std::strerror(errno)) +
                                          "); set TMPDIR to a folder with space");
    Finished finished = run(arguments(job, source, target));
    if (finished.status != 0)
      throw_compile_error(*this, job, finished.output + "exit status " + std::to_string(finished.status));
    std::optional<std::string> binary = read_file(target);
    if (!binary || binary->empty()) throw_compile_error(*this, job, finished.output + "nvcc wrote no machine code");
    return {std::move(*binary), std::move(finished.output)};
  }

 private:
  std::vector<std::string> arguments(const CompileJob& job, const std::string& source,
                                     const std::string& target) const {
    std::vector<std::string> all = {path(), "-cubin"};
    all.insert(all.end(), job.flags.begin(), job.flags.end());
    all.insert(all.end(), {"-I", job.source_root, "-o", target, source});
    return all;
  }
};

// The last words of `nvcc --version` that name a release: "Build cuda_13.0.r13.0/compiler.36424714_0".
std::string version_of(const std::string& nvcc) {
  Finished finished = run({nvcc, "--version"});
  if (finished.status != 0) return "";
  std::vector<std::string> lines = split(finished.output, '\n');
  return lines.empty() ? "" : lines.back();
}

}  // namespace

std::shared_ptr<const Compiler> find_nvcc(std::string& tried) {
  std::vector<std::string> candidates;
  if (const std::string given = environment("DEEPINFER_NVCC"); !given.empty()) {
    candidates = {given};
  } else {
    for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
      if (const std::string home = environment(variable); !home.empty()) candidates.push_back(home + "/bin/nvcc");
    for (const std::string& folder : split(environment("PATH"), ':')) candidates.push_back(folder + "/nvcc");
    candidates.push_back("/usr/local/cuda/bin/nvcc");
  }
  for (const std::string& candidate : candidates) {
    tried += "  " + candidate + "\n";
    if (access(candidate.c_str(), X_OK) != 0) continue;
    std::string version = version_of(candidate);
    if (version.empty()) continue;
    // nvcc takes further flags from these two, unseen by us.
    for (const char* variable : {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"})
      if (const std::string value = environment(variable); !value.empty()) version += " " + value;
    return std::make_shared<Nvcc>("nvcc " + version, candidate);
  }
  return nullptr;
}

}  // namespace deepinfer::jit
