#include "build.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>

#include "cache.h"
#include "compiler.h"
#include "sha256.h"

namespace deepinfer::jit {

namespace {

using Result = std::shared_ptr<const Binary>;

// Kernels that are built or being built, by key.
struct State {
  std::mutex mutex;
  std::map<std::string, std::shared_future<Result>> kernels;
};

// A forked child starts afresh: at the fork another thread may have held the mutex or been compiling.
State* state = new State;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { state = new State; });

struct Request {
  CompileJob job;
  std::string key;
  std::vector<std::string> includes;
};

bool is_identifier(const std::string& name) {
  constexpr const char* kGood = "_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  return !name.empty() && name.find_first_not_of(kGood) == name.npos;
}

// "sm_90", "sm_90a", "sm_100f", "dav-2201"
bool is_arch(const std::string& arch) {
  if (is_ascend(arch)) return arch.size() == 8 && arch.find_first_not_of("0123456789", 4) == arch.npos;
  if (!arch.starts_with("sm_")) return false;
  const size_t end = std::min(arch.find_first_not_of("0123456789", 3), arch.size());
  const std::string suffix = arch.substr(end);
  return end >= 5 && (suffix.empty() || suffix == "a" || suffix == "f");
}

Request request_for(const Compiler& compiler, const std::string& name, const std::string& text, const std::string& arch,
                    const std::string& extra_flags) {
  Request request{{name, text, arch, compiler.flags(arch), source_root()}, "", {}};
  for (std::string& flag : split(extra_flags, ' ')) request.job.flags.push_back(std::move(flag));
  Sha256 key;
  key.add_piece(name).add_piece(arch).add_piece(compiler.identity());
  for (const std::string& flag : request.job.flags) key.add_piece(flag);
  key.add_piece(text).add_piece(digest_of_includes(text, request.includes));
  request.key = key.hex();
  return request;
}

Result compile(const Compiler& compiler, const Cache& cache, const Request& request) {
  const auto start = std::chrono::steady_clock::now();
  Compiled compiled = compiler.compile(request.job);
  auto binary = std::make_shared<Binary>();
  binary->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  binary->bytes = std::move(compiled.binary);
  binary->log = std::move(compiled.log);
  std::string includes;
  for (const std::string& file : request.includes) includes += (includes.empty() ? "" : " ") + file;
  binary->path = cache.store({request.job.name, request.job.arch, request.key, request.job.text, binary->bytes,
                              {{"compiler", compiler.identity()},
                               {"seconds", std::to_string(binary->seconds)},
                               {"includes", includes},
                               {"command", compiler.command(request.job)}}});
  return binary;
}

Built find_or_compile(const Compiler& compiler, const Request& request) {
  const Cache cache = Cache::from_environment();
  auto from_disk = [&]() -> Result {
    std::string path;
    auto bytes = cache.find(request.job.name, request.job.arch, request.key, path);
    if (!bytes) return nullptr;
    return std::make_shared<Binary>(Binary{std::move(*bytes), path, "", 0});
  };
  if (Result found = from_disk()) return {found, Origin::disk};
  const auto lock = cache.lock(request.key);
  if (Result found = from_disk()) return {found, Origin::disk};
  return {compile(compiler, cache, request), Origin::compiled};
}

void report(const Request& request, const Built& built) {
  static const bool verbose = !environment("DEEPINFER_JIT_VERBOSE").empty();
  if (!verbose || built.origin == Origin::memory) return;
  const bool compiled = built.origin == Origin::compiled;
  std::fprintf(stderr, "torch_deepinfer: %s for %s %s %s\n", request.job.name.c_str(), request.job.arch.c_str(),
               compiled ? ("compiled in " + std::to_string(built.binary->seconds) + " s,").c_str() : "from",
               built.binary->path.empty() ? "not cached: no cache folder can be written" : built.binary->path.c_str());
}

}  // namespace

Built build(const std::string& name, const std::string& text, const std::string& arch, const std::string& extra_flags) {
  if (!is_identifier(name)) throw std::invalid_argument("a kernel needs a C name, got " + name);
  if (!is_arch(arch))
    throw std::invalid_argument("kernel " + name + ": an architecture is written like sm_90a or dav-2201, got " + arch);
  const std::shared_ptr<const Compiler> compiler = is_ascend(arch) ? ascend_compiler() : cuda_compiler();
  const Request request = request_for(*compiler, name, text, arch, extra_flags);

  State& shared = *state;
  std::promise<Result> promise;
  std::shared_future<Result> pending;
  {
    std::lock_guard lock(shared.mutex);
    auto [place, is_new] = shared.kernels.try_emplace(request.key);
    if (is_new)
      place->second = promise.get_future().share();
    else
      pending = place->second;
  }
  if (pending.valid()) return {pending.get(), Origin::memory};

  try {
    Built built = find_or_compile(*compiler, request);
    report(request, built);
    promise.set_value(built.binary);
    return built;
  } catch (...) {
    promise.set_exception(std::current_exception());
    std::lock_guard lock(shared.mutex);
    shared.kernels.erase(request.key);  // the next call tries again
    throw;
  }
}

}  // namespace deepinfer::jit
