// A small library on csrc/jit, as a family of ops is: built by test_jit_launch.py, launches the kernels of
// launch_probe.cuh.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "jit/cuda_launch.h"
#include "jit/tensor_map.h"

namespace deepinfer {

namespace {

using torch::stable::Tensor;

constexpr const char* kHeader = "../tests/native/launch_probe.cuh";

struct ProbeConfig {
  int cluster, shared_bytes;
};

struct ProbeArgs {
  int* out;
};

jit::KernelSource describe_probe(const ProbeConfig& c) {
  jit::KernelSource source;
  source.name = "probe";
  source.header = kHeader;
  source.config = "ProbeConfig";
  source.args = "ProbeArgs";
  source.facts = {{"cluster", c.cluster}, {"shared_bytes", c.shared_bytes}};
  source.threads = 128;
  source.cluster = c.cluster;
  source.shared_bytes = c.shared_bytes;
  source.pdl = true;
  return source;
}

jit::Kernels<ProbeConfig> probes(describe_probe, [] { return std::vector<ProbeConfig>{}; });

struct TileCopyConfig {
  int rows, columns;
};

struct TileCopyArgs {
  TensorMap input;
  float* out;
  int tiles_across;
};

jit::KernelSource describe_tile_copy(const TileCopyConfig& c) {
  jit::KernelSource source;
  source.name = "tile_copy";
  source.header = kHeader;
  source.config = "TileCopyConfig";
  source.args = "TileCopyArgs";
  source.facts = {{"rows", c.rows}, {"columns", c.columns}};
  source.threads = 128;
  return source;
}

jit::Kernels<TileCopyConfig> tile_copies(describe_tile_copy, [] { return std::vector<TileCopyConfig>{}; });

void probe(Tensor out, int64_t cluster, int64_t shared_bytes) {
  const ProbeArgs args{static_cast<int*>(out.mutable_data_ptr())};
  probes.launch(out.get_device_index(), {int(cluster), int(shared_bytes)}, {unsigned(out.size(0))}, args);
}

// Without a tensor, for the stand-in of the driver.
void launch(int64_t device, int64_t blocks, int64_t cluster, int64_t shared_bytes) {
  const ProbeArgs args{reinterpret_cast<int*>(0x1234)};
  probes.launch(int(device), {int(cluster), int(shared_bytes)}, {unsigned(blocks)}, args);
}

void tile_copy(const Tensor& input, Tensor out) {
  const auto rows = uint32_t(out.size(2)), columns = uint32_t(out.size(3));
  const auto pitch = uint64_t(input.stride(0)) * sizeof(float);
  TileCopyArgs args{};
  args.input = jit::encode_tensor_map({.type = jit::TensorMapType::f32,
                                       .rank = 2,
                                       .address = const_cast<void*>(input.const_data_ptr()),
                                       .sizes = {uint64_t(input.size(1)), uint64_t(input.size(0))},
                                       .strides = {pitch},
                                       .box = {columns, rows},
                                       .swizzle = jit::Swizzle::none},
                                      "tile_copy");
  args.out = static_cast<float*>(out.mutable_data_ptr());
  args.tiles_across = int(out.size(1));
  tile_copies.launch(out.get_device_index(), {int(rows), int(columns)}, {unsigned(out.size(0) * out.size(1))}, args);
}

}  // namespace

STABLE_TORCH_LIBRARY(deepinfer_probe, m) {
  m.def("probe(Tensor(a!) out, int cluster, int shared_bytes) -> ()");
  m.def("launch(int device, int blocks, int cluster, int shared_bytes) -> ()");
  m.def("tile_copy(Tensor input, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer_probe, CUDA, m) {
  m.impl("probe", TORCH_BOX(&probe));
  m.impl("tile_copy", TORCH_BOX(&tile_copy));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer_probe, CompositeExplicitAutograd, m) { m.impl("launch", TORCH_BOX(&launch)); }

}  // namespace deepinfer
