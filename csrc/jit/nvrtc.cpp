// NVRTC, NVIDIA's compiler as a library. Only its public C interface is used, looked up by name; its headers are not
// needed. The library is found by looking at files, and loaded when something has to be compiled: a start from a warm
// cache never pays for it.

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <type_traits>

#include "compiler.h"
#include "files.h"

namespace deepinfer::jit {

namespace {

using Program = void*;

struct Library {
  int (*create)(Program*, const char* source, const char* name, int headers, const char* const* header_sources,
                const char* const* header_names) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*compile)(Program, int count, const char* const* options) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
  int (*arch_count)(int*) = nullptr;
  int (*archs)(int*) = nullptr;
  const char* (*error_string)(int) = nullptr;
};

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// The newest libnvrtc.so.N in a folder, or an empty string.
std::string library_in(const std::string& folder) {
  std::string best;
  for (const std::string& name : names_in(folder)) {
    const bool candidate = name.starts_with("libnvrtc.so") && name.find(".alt") == name.npos;
    // "libnvrtc.so.13" over "libnvrtc.so.12" over "libnvrtc.so"
    if (candidate && (name.size() > best.size() || (name.size() == best.size() && name > best))) best = name;
  }
  return best.empty() ? "" : folder + "/" + best;
}

// The helper library of the same release, which libnvrtc opens by name: "libnvrtc-builtins.so.13.0".
std::string builtins_in(const std::string& folder) {
  std::string best;
  for (const std::string& name : names_in(folder))
    if (name.starts_with("libnvrtc-builtins.so.") && name.size() > best.size()) best = name;
  return best;
}

std::string path_of_handle(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "";
}

class Nvrtc final : public Compiler {
 public:
  Nvrtc(std::string identity, std::string path) : Compiler(std::move(identity), std::move(path)) {}

  std::vector<std::string> flags(const std::string& arch) const override {
    return {"--std=c++20", "--gpu-architecture=" + arch, "--fmad=false"};
  }

  std::string command(const CompileJob& job) const override {
    // NVRTC's options are nvcc's, except for how the architecture is named.
    std::string text = "nvcc -cubin -o " + job.name + ".cubin";
    for (const std::string& flag : job.flags) {
      const bool arch = flag.starts_with("--gpu-architecture=sm_");
      text += " " + (arch ? "-gencode arch=compute_" + job.arch.substr(3) + ",code=" + job.arch : flag);
    }
    return text + " -I " + job.source_root + " kernel.cu";
  }

  Compiled compile(const CompileJob& job) const override {
    const Library& lib = library();
    check_arch(lib, job);
    std::vector<std::string> options = job.flags;
    options.push_back("-I" + job.source_root);
    for (const std::string& folder : header_folders()) options.push_back("-I" + folder);
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());

    Program program = nullptr;
    int error = lib.create(&program, job.text.c_str(), (job.name + ".cu").c_str(), 0, nullptr, nullptr);
    if (error) throw_compile_error(*this, job, lib.error_string(error));
    struct Destroyer {
      const Library& lib;
      Program& program;
      ~Destroyer() { lib.destroy(&program); }
    } destroyer{lib, program};

    error = lib.compile(program, int(pointers.size()), pointers.data());
    Compiled result;
    size_t size = 0;
    if (lib.log_size(program, &size) == 0 && size > 1) {
      result.log.resize(size);
      lib.log(program, result.log.data());
      result.log.resize(result.log.find_last_not_of('\0') + 1);
    }
    if (error) throw_compile_error(*this, job, result.log.empty() ? lib.error_string(error) : result.log);
    if (lib.cubin_size(program, &size) || size == 0) throw_compile_error(*this, job, "NVRTC returned no machine code");
    result.binary.resize(size);
    lib.cubin(program, result.binary.data());
    return result;
  }

 private:
  const Library& library() const {
    std::call_once(loaded_, [this] {
      const std::string builtins = builtins_in(folder_of(path()));
      // Before libnvrtc asks for it by its bare name, which finds it only if the loader's path happens to lead there.
      if (!builtins.empty()) dlopen((folder_of(path()) + "/" + builtins).c_str(), RTLD_NOW);
      void* handle = dlopen(path().c_str(), RTLD_NOW);
      if (!handle) throw std::runtime_error("NVRTC cannot be loaded: " + std::string(dlerror()));
      auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
        if (!function) throw std::runtime_error("NVRTC at " + path() + " is too old: it has no " + name);
      };
      find(library_.create, "nvrtcCreateProgram");
      find(library_.destroy, "nvrtcDestroyProgram");
      find(library_.compile, "nvrtcCompileProgram");
      find(library_.log_size, "nvrtcGetProgramLogSize");
      find(library_.log, "nvrtcGetProgramLog");
      find(library_.cubin_size, "nvrtcGetCUBINSize");
      find(library_.cubin, "nvrtcGetCUBIN");
      find(library_.arch_count, "nvrtcGetNumSupportedArchs");
      find(library_.archs, "nvrtcGetSupportedArchs");
      find(library_.error_string, "nvrtcGetErrorString");
    });
    return library_;
  }

  void check_arch(const Library& lib, const CompileJob& job) const {
    int count = 0;
    if (lib.arch_count(&count) || count <= 0) return;
    std::vector<int> archs(count);
    lib.archs(archs.data());
    const int wanted = std::atoi(job.arch.c_str() + 3);
    std::string supported;
    for (int arch : archs) {
      if (arch == wanted) return;
      supported += " sm_" + std::to_string(arch);
    }
    throw_compile_error(*this, job, "it does not know the architecture " + job.arch + ", only" + supported);
  }

  // cuda_fp16.h and its like, for kernels that ask for them: beside the library, in a wheel or a toolkit.
  std::vector<std::string> header_folders() const {
    const std::string parent = folder_of(folder_of(path()));
    std::vector<std::string> found;
    for (const std::string& folder : {parent + "/include", folder_of(parent) + "/cuda_runtime/include"})
      if (is_file(folder + "/cuda_fp16.h")) found.push_back(folder);
    return found;
  }

  mutable std::once_flag loaded_;
  mutable Library library_;
};

// The version is in the name of the helper library; releases within a version differ in size.
std::shared_ptr<const Compiler> at(const std::string& path) {
  const std::string builtins = builtins_in(folder_of(path));
  const size_t prefix = std::string("libnvrtc-builtins.so.").size();
  std::string version = builtins.empty() ? path.substr(path.rfind('/') + 1) : builtins.substr(prefix);
  if (auto status = file_status(path)) version += " build " + std::to_string(status->size);
  return std::make_shared<Nvrtc>("nvrtc " + version, path);
}

// site-packages, from torch/lib/libtorch_cpu.so.
std::string folder_of_torch() {
  void* symbol = dlsym(RTLD_DEFAULT, "aoti_torch_get_device_type");
  Dl_info info;
  if (!symbol || !dladdr(symbol, &info) || !info.dli_fname) return "";
  return folder_of(folder_of(folder_of(info.dli_fname)));
}

}  // namespace

std::shared_ptr<const Compiler> find_nvrtc(const std::vector<std::string>& package_folders, std::string& tried) {
  auto note = [&](const std::string& place) { tried += "  " + place + "\n"; };
  if (const std::string given = environment("DEEPINFER_NVRTC"); !given.empty()) {
    note("DEEPINFER_NVRTC=" + given);
    return is_file(given) ? at(given) : nullptr;
  }
  const char* names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
  for (const char* name : names)
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return at(path_of_handle(handle));
  note("the libraries of this process");

  std::vector<std::string> folders;
  std::vector<std::string> packages = {folder_of_torch()};
  packages.insert(packages.end(), package_folders.begin(), package_folders.end());
  for (const std::string& site : packages) {
    if (site.empty() || !is_directory(site + "/nvidia")) continue;
    folders.push_back(site + "/nvidia/cu13/lib");
    folders.push_back(site + "/nvidia/cuda_nvrtc/lib");
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string home = environment(variable); !home.empty()) folders.push_back(home + "/lib64");
  folders.push_back("/usr/local/cuda/lib64");
  for (const std::string& folder : folders) {
    const std::string path = library_in(folder);
    if (!path.empty()) return at(path);
    note(folder);
  }
  for (const char* name : names)
    if (void* handle = dlopen(name, RTLD_NOW)) return at(path_of_handle(handle));
  note("the loader's path");
  return nullptr;
}

}  // namespace deepinfer::jit
