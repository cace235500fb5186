#include "source.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "files.h"
#include "sha256.h"

namespace deepinfer::jit {

Fact::Fact(const char* name, DType dtype) : name(name) {
  switch (dtype) {
    case DType::f32: value = "DType::f32"; break;
    case DType::bf16: value = "DType::bf16"; break;
    case DType::f16: value = "DType::f16"; break;
  }
}

std::string KernelSource::text() const {
  std::string bounds = std::to_string(threads);
  if (blocks_per_sm) bounds += ", " + std::to_string(blocks_per_sm);
  std::string out = "// Generated. manifest.txt beside this file tells how to compile it by hand.\n";
  out += "#include \"" + header + "\"\n\nnamespace deepinfer {\nconstexpr " + config + " config{\n";
  for (const Fact& fact : facts) out += "    ." + fact.name + " = " + fact.value + ",\n";
  out += "};\n}  // namespace deepinfer\n\nextern \"C\" __global__ void __launch_bounds__(" + bounds + ")\n" + name +
         "(const __grid_constant__ deepinfer::" + args + " args) {\n  deepinfer::" + name +
         "<deepinfer::config>(args);\n}\n";
  return out;
}

namespace {

std::string folder_of_this_library() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&folder_of_this_library), &info) || !info.dli_fname) return ".";
  std::string path = info.dli_fname;
  size_t slash = path.rfind('/');
  return slash == path.npos ? "." : path.substr(0, slash);
}

// "cuda/../cpu/types.h" -> "cpu/types.h"
std::string normalized(std::string_view path) {
  std::vector<std::string> parts;
  for (std::string& part : split(path, '/')) {
    if (part == ".." && !parts.empty() && parts.back() != "..")
      parts.pop_back();
    else if (part != ".")
      parts.push_back(std::move(part));
  }
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : "/") + part;
  return out;
}

// The name in a line `#include "name"`, else empty.
std::string_view included_name(std::string_view line) {
  auto skip_blanks = [&] { line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size())); };
  auto skip = [&](std::string_view token) {
    skip_blanks();
    bool found = line.starts_with(token);
    if (found) line.remove_prefix(token.size());
    return found;
  };
  if (!skip("#") || !skip("include") || !skip("\"")) return {};
  return line.substr(0, line.find('"'));
}

void visit(const std::string& text, const std::string& folder, std::vector<std::string>& seen, Sha256& digest) {
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = rest.find('\n');
    const std::string_view name = included_name(rest.substr(0, end));
    rest = end == rest.npos ? std::string_view() : rest.substr(end + 1);
    if (name.empty()) continue;
    // As the compiler does: beside the including file first, then from the root.
    std::string path = normalized(folder + std::string(name));
    std::optional<std::string> content = read_file(source_root() + "/" + path);
    if (!content) content = read_file(source_root() + "/" + (path = normalized(name)));
    if (!content)
      throw std::runtime_error("the kernel header " + std::string(name) + " is missing in " + source_root() +
                               "; reinstall torch_deepinfer, or set DEEPINFER_SOURCE_DIR to its csrc folder");
    if (std::find(seen.begin(), seen.end(), path) != seen.end()) continue;
    seen.push_back(path);
    digest.add_piece(path).add_piece(*content);
    visit(*content, path.substr(0, path.rfind('/') + 1), seen, digest);
  }
}

}  // namespace

const std::string& source_root() {
  static const std::string root = [] {
    std::string given = environment("DEEPINFER_SOURCE_DIR");
    return given.empty() ? folder_of_this_library() + "/csrc" : given;
  }();
  return root;
}

std::string digest_of_includes(const std::string& text, std::vector<std::string>& files) {
  Sha256 digest;
  visit(text, "", files, digest);
  return digest.hex();
}

}  // namespace deepinfer::jit
