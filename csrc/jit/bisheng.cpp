// bisheng, the compiler of CANN, and its linker: from Ascend C to an object that the device runs.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "compiler.h"
#include "elf.h"
#include "files.h"
#include "process.h"

namespace deepinfer::jit {

namespace {

class Bisheng final : public Compiler {
 public:
  Bisheng(std::string identity, std::string path, std::string linker)
      : Compiler(std::move(identity), std::move(path)), linker_(std::move(linker)) {}

  std::vector<std::string> flags(const std::string& arch) const override {
    return {"-x", "asc", "-std=c++17", "-O2", "--npu-arch=" + arch, "--cce-aicore-only", "-ffp-contract=off"};
  }

  std::string command(const CompileJob& job) const override {
    return joined(compile_arguments(job, "kernel.asc", "kernel.o")) + " && " +
           joined(link_arguments("kernel.o", job.name + ".o"));
  }

  // A compiler that reports success and writes nothing usable is known, so the object itself is looked at.
  Compiled compile(const CompileJob& job) const override {
    TemporaryDirectory folder;
    const std::string source = folder.path + "/kernel.asc", object = folder.path + "/kernel.o",
                      target = folder.path + "/linked.o";
    if (folder.path.empty() || !write_file(source, job.text))
      throw_compile_error(*this, job, "no temporary file could be written (" + std::string(std::strerror(errno)) +
                                          "); set TMPDIR to a folder with space");
    std::string log;
    for (const auto& command : {compile_arguments(job, source, object), link_arguments(object, target)}) {
      const Finished finished = run(command);
      log += finished.output;
      if (finished.status != 0) throw_compile_error(*this, job, log + "exit status " + std::to_string(finished.status));
    }
    std::optional<std::string> binary = read_file(target);
    if (!binary || binary->empty()) throw_compile_error(*this, job, log + "bisheng wrote no object");
    const std::vector<std::string> kernels = kernels_of_elf(*binary);
    if (std::find(kernels.begin(), kernels.end(), job.name) == kernels.end())
      throw_compile_error(*this, job, log + "the object has no section .ascend.meta." + job.name);
    return {std::move(*binary), std::move(log)};
  }

 private:
  std::vector<std::string> compile_arguments(const CompileJob& job, const std::string& source,
                                             const std::string& target) const {
    std::vector<std::string> all = {path()};
    all.insert(all.end(), job.flags.begin(), job.flags.end());
    all.insert(all.end(), {"-I", job.source_root, "-c", "-o", target, source});
    return all;
  }
  std::vector<std::string> link_arguments(const std::string& object, const std::string& target) const {
    return {linker_, "-m", "aicorelinux", "-Ttext", "0", "-o", target, object};
  }

  std::string linker_;
};

std::string folder_of(const std::string& file) { return file.substr(0, file.rfind('/')); }

// All lines but those that tell where something is installed.
std::string without_paths(const std::string& text) {
  std::string kept;
  for (const std::string& line : split(text, '\n'))
    if (line.find('/') == line.npos) kept += (kept.empty() ? "" : ", ") + line;
  return kept;
}

// Of the toolkit around a compiler, whose headers are part of every kernel; empty if it does not say.
std::string toolkit_version(const std::string& compiler) {
  for (std::string folder = folder_of(compiler); !folder.empty(); folder = folder_of(folder))
    for (const char* name : {"/version.cfg", "/ascend_toolkit_install.info"})
      if (const auto text = read_file(folder + name)) return without_paths(*text);
  return "";
}

// Of the compiler and its toolkit; empty if it does not run.
std::string version_of(const std::string& compiler) {
  const Finished finished = run({compiler, "--version"});
  if (finished.status != 0) return "";
  const std::string toolkit = toolkit_version(compiler);
  return without_paths(finished.output) + (toolkit.empty() ? "" : "; " + toolkit);
}

// Where toolkits have them: bin, the folder of this machine's kind, or that of the compiler.
std::vector<std::string> places_in(const std::string& home) {
#if defined(__aarch64__)
  const std::string machine = "/aarch64-linux";
#else
  const std::string machine = "/x86_64-linux";
#endif
  return {home + "/bin/bisheng", home + machine + "/bin/bisheng", home + machine + "/ccec_compiler/bin/bisheng",
          home + "/compiler/ccec_compiler/bin/bisheng", home + "/tools/ccec_compiler/bin/bisheng"};
}

}  // namespace

std::shared_ptr<const Compiler> find_bisheng(std::string& tried) {
  std::vector<std::string> candidates;
  if (const std::string given = environment("DEEPINFER_BISHENG"); !given.empty()) {
    candidates = {given};
  } else {
    std::vector<std::string> homes;
    for (const char* variable : {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"})
      if (const std::string home = environment(variable); !home.empty()) homes.push_back(home);
    homes.insert(homes.end(), {"/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"});
    if (const std::string home = environment("HOME"); !home.empty())
      homes.insert(homes.end(), {home + "/Ascend/cann", home + "/Ascend/ascend-toolkit/latest"});
    for (const std::string& home : homes)
      for (std::string& place : places_in(home)) candidates.push_back(std::move(place));
    for (const std::string& folder : split(environment("PATH"), ':')) candidates.push_back(folder + "/bisheng");
  }
  for (const std::string& candidate : candidates) {
    tried += "  " + candidate + "\n";
    if (access(candidate.c_str(), X_OK) != 0) continue;
    const std::string version = version_of(candidate), linker = folder_of(candidate) + "/ld.lld";
    if (version.empty()) continue;
    if (access(linker.c_str(), X_OK) != 0) {
      tried.insert(tried.size() - 1, " (without ld.lld beside it)");
      continue;
    }
    return std::make_shared<Bisheng>("bisheng " + version, candidate, linker);
  }
  return nullptr;
}

}  // namespace deepinfer::jit
