#include "ascend_source.h"

namespace deepinfer::jit {

std::string AscendSource::text() const {
  std::string parameters, arguments;
  for (const std::string& buffer : buffers) {
    parameters += "GM_ADDR " + buffer + ", ";
    arguments += buffer + ", ";
  }
  std::string out = "// Generated. manifest.txt beside this file tells how to compile it by hand.\n";
  out += "#include \"" + header + "\"\n\nnamespace deepinfer::npu {\nstruct Config {\n";
  for (const Fact& fact : facts) out += "  static constexpr auto " + fact.name + " = " + fact.value + ";\n";
  const std::string kind = cube ? "__cube__" : "__vector__";
  out += "};\n}  // namespace deepinfer::npu\n\nextern \"C\" __global__ " + kind + " void " + name + "(" + parameters +
         "deepinfer::npu::" + tiling + " tiling) {\n  deepinfer::npu::" + name + "<deepinfer::npu::Config>(" +
         arguments + "tiling);\n}\n";
  return out;
}

}  // namespace deepinfer::jit
