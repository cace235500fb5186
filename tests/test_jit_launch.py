"""Loading and launching kernels: on a stand-in of the driver everywhere, on a GPU where there is one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checking import assert_bit_equal
from forking import in_child

from torch_deepinfer import jit, ops

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"


@pytest.fixture(scope="session")
def probe_library(tmp_path_factory):
    """native/launch_probe.cpp, built with the sources of csrc/jit."""
    torch_root = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("native") / "launch_probe.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{CSRC}", "-isystem", str(torch_root / "include")]
    command += [str(TESTS / "native/launch_probe.cpp"), *map(str, sorted(CSRC.glob("jit/*.cpp")))]
    command += ["-o", str(library), f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return str(library)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    library = tmp_path_factory.mktemp("native") / "libcuda.so.1"
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, TESTS / "native/fake_driver.c", "-o", library], check=True)
    return str(library)


@pytest.mark.parametrize(
    "scenario", ["configuration", "attributes", "loaded_once", "two_devices", "capture", "fork", "no_compiler"]
)
def test_on_a_stand_in_of_the_driver(scenario, probe_library, fake_driver, tmp_path):
    environment = os.environ | {
        "LD_PRELOAD": fake_driver,
        "PROBE_LIBRARY": probe_library,
        "DEEPINFER_SOURCE_DIR": str(CSRC),
        "DEEPINFER_CACHE_DIR": str(tmp_path),
        # torch's folder, for the library that is not part of a package
        "DEEPINFER_NVRTC": "/nonexistent" if scenario == "no_compiler" else jit.compiler().path,
        "DEEPINFER_JIT_COMPILER": "nvrtc",
    }
    subprocess.run([sys.executable, TESTS / "launch_worker.py", scenario], env=environment, check=True, timeout=300)


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])


def norm_inputs(rows=64, hidden_size=4096, dtype=torch.bfloat16, device="cuda"):
    x = torch.randn(rows, hidden_size, device=device).to(dtype)
    return x, torch.randn(hidden_size, device=device).to(dtype)


@gpu
def test_capture(device):
    # This combination occurs nowhere else, so that nothing has loaded its kernel before.
    x, weight = norm_inputs(3, 33, torch.float16)
    weight = weight.float()

    def call():
        return ops.rms_norm(x, weight, 1e-6, "one_plus")

    with (
        pytest.raises(RuntimeError, match=r"rms_norm is used for the first time.*warm up"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call()
    torch.cuda.synchronize()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_bit_equal(out, call())


@gpu
def test_reduce_overhead(device):
    x, weight = norm_inputs()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def block(x, residual):
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        return normed * 2, total

    for _ in range(5):
        residual = torch.randn_like(x)
        normed, total = block(x, residual)
        expected, expected_total = ops.add_rms_norm(x, residual, weight, 1e-6)
        assert_bit_equal(normed, expected * 2)
        assert_bit_equal(total, expected_total)


@gpu
def test_side_stream(device):
    x, weight = norm_inputs()
    values = torch.randn_like(x)
    expected = ops.rms_norm(values, weight, 1e-6)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would run before x is written
        x.copy_(values)
        out = ops.rms_norm(x, weight, 1e-6)
    stream.synchronize()
    assert_bit_equal(out, expected)


@gpu
def test_a_chain_of_overlapping_launches(device):
    # Programmatic dependent launch: each kernel starts while the one before it still writes what it is to read.
    x, weight = norm_inputs(2048, 4096)
    residual = torch.randn_like(x)

    def chain(synchronize):
        normed, total = x, residual
        for _ in range(50):
            normed, total = ops.add_rms_norm(normed, total, weight.mul(1.0), 1e-6)
            if synchronize:
                torch.cuda.synchronize()
        return normed, total

    apart, together = chain(True), chain(False)
    assert_bit_equal(together[0], apart[0])
    assert_bit_equal(together[1], apart[1])


@gpu
def test_threads_share_a_first_launch(device):
    x, weight = norm_inputs(5, 1000, torch.float16)
    outs = [None] * 8

    def call(i):
        outs[i] = ops.rms_norm(x, weight, 1e-6, "mul_cast")

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for out in outs:
        assert_bit_equal(out, outs[0])


@gpu
def test_fork_after_use(device):
    x, weight = norm_inputs()
    ops.rms_norm(x, weight, 1e-6)
    with pytest.raises(RuntimeError):
        in_child(lambda: ops.rms_norm(x, weight, 1e-6).shape)
    cpu = torch.randn(2, 8)
    assert (
        in_child(lambda: ops.rms_norm(cpu, None, 1e-6, "none").tolist())
        == ops.rms_norm(cpu, None, 1e-6, "none").tolist()
    )


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")
def test_two_devices():
    expected = None
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x, weight = norm_inputs(device="cpu")
        out = ops.rms_norm(x.to(device), weight.to(device), 1e-6)
        assert out.device == torch.device(device)
        assert torch.cuda.current_device() == 0
        expected = out if expected is None else expected
        assert_bit_equal(out, expected)


@pytest.fixture(scope="session")
def probe(probe_library):
    os.environ["DEEPINFER_SOURCE_DIR"] = str(CSRC)
    torch.ops.load_library(probe_library)
    return torch.ops.deepinfer_probe


@gpu
@pytest.mark.parametrize("shared_bytes", [0, 48 * 1024, 200 * 1024])
def test_dynamic_shared_memory(device, probe, shared_bytes):
    out = torch.zeros(5, 4, dtype=torch.int32, device=device)
    probe.probe(out, 1, shared_bytes)
    assert out.tolist() == [[1, shared_bytes, 0, 128]] * 5


@gpu
@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters(device, probe, cluster):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters came with compute capability 9.0")
    out = torch.zeros(2 * cluster, 4, dtype=torch.int32, device=device)
    probe.probe(out, cluster, 1024)
    assert out.tolist() == [[cluster, 1024, 0, 128]] * (2 * cluster)


@gpu
def test_too_much_shared_memory(device, probe):
    with pytest.raises(RuntimeError, match=r"probe with 1000000 bytes of shared memory: CUDA_ERROR_\w+"):
        probe.probe(torch.zeros(1, 4, dtype=torch.int32, device=device), 1, 1000000)


@gpu
def test_tensor_map(device, probe):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies came with compute capability 9.0")
    wide = torch.randn(50, 120, device=device)
    view = wide[:, :100]  # neither whole tiles nor dense
    out = torch.full((4, 4, 16, 32), float("nan"), device=device)
    probe.tile_copy(view, out)
    padded = torch.nn.functional.pad(view, (0, 28, 0, 14))
    assert_bit_equal(out, padded.reshape(4, 16, 4, 32).transpose(1, 2).contiguous())
    with pytest.raises(
        RuntimeError, match=r"tile_copy: no tensor map for a tensor of 50 99, box 16 32, strides in bytes 396"
    ):
        probe.tile_copy(torch.randn(50, 99, device=device), out)
