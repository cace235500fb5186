"""From torch to a launch: the compiler, the cache, devices, streams and errors, on the stand-in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import calls
import pytest
import torch
from checking import assert_bit_equal
from chips import ascend_archs
from forking import Child

import torch_deepinfer
from torch_deepinfer import jit, ops

pytestmark = calls.needs_standin

PACKAGE = Path(torch_deepinfer.__file__).parent


def test_every_sample_compiles_for_both_architectures():
    for kernel in jit.ascend_samples():
        for arch in ascend_archs(kernel):
            assert jit.compile(kernel, arch).log == ""


def test_architecture_of_the_device_decides(tmp_path):
    for soc, arch in (("Ascend910B1", "dav-2201"), ("Ascend910_9391", "dav-2201"), ("Ascend950PR_9599", "dav-3510")):
        environment = {"DEEPINFER_STANDIN_SOC": soc, "DEEPINFER_CACHE_DIR": str(tmp_path / soc)}
        Child(calls.norm, environment).result()
        (entry,) = (tmp_path / soc / "v1" / "entries").iterdir()
        assert entry.name.startswith(f"rms_norm-{arch}-")
        assert {path.name for path in entry.iterdir()} == {"kernel.asc", "kernel.o", "manifest.txt"}
        assert f"--npu-arch={arch}" in (entry / "manifest.txt").read_text()


def test_unknown_chip_is_named():
    with pytest.raises(RuntimeError, match="kernels for Ascend 910B, 910_93 and 950, not for Ascend310P3"):
        Child(calls.norm, {"DEEPINFER_STANDIN_SOC": "Ascend310P3"}).result()


def test_missing_compiler():
    with pytest.raises(RuntimeError, match=r"found no bisheng.*set_env\.sh(.|\n)*Looked at:\n  /nowhere/bisheng"):
        Child(calls.norm, {"DEEPINFER_BISHENG": "/nowhere/bisheng"}).result()


def test_compiler_without_its_linker(tmp_path):
    shutil.copy2(Path(os.environ["ASCEND_HOME_PATH"]) / "bin" / "bisheng", tmp_path)
    with pytest.raises(RuntimeError, match=r"without ld\.lld beside it"):
        Child(calls.norm, {"DEEPINFER_BISHENG": str(tmp_path / "bisheng")}).result()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", "exit status"),  # reports success and writes nothing
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "no section .ascend.meta.rms_norm"),
        ("echo 'kernel.asc:1: error: that is wrong'; exit 3", "kernel.asc:1: error: that is wrong\nexit status 3"),
    ],
)
def test_compiler_that_fails(tmp_path, script, message):
    for name in ("bisheng", "ld.lld"):
        shutil.copy2(Path(os.environ["ASCEND_HOME_PATH"]) / "bin" / name, tmp_path)
    (tmp_path / "bisheng").write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo one; exit 0; }}\n{script}\n')
    environment = {"DEEPINFER_BISHENG": str(tmp_path / "bisheng"), "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}
    with pytest.raises(RuntimeError, match=f"compiling the kernel rms_norm for dav-\\d+(.|\n)*{message}"):
        Child(calls.norm, environment).result()


def _copy_toolkit_to(folder: Path) -> None:
    for part in ("bin", "lib", "include"):
        shutil.copytree(Path(os.environ["ASCEND_HOME_PATH"]) / part, folder / part, symlinks=True)


def test_linker_that_fails(tmp_path):
    _copy_toolkit_to(tmp_path)
    linker = tmp_path / "bin" / "ld.lld"
    linker.write_text("#!/bin/sh\necho 'ld.lld: undefined symbol: main'; exit 1\n")
    environment = {"DEEPINFER_BISHENG": str(tmp_path / "bin" / "bisheng"), "DEEPINFER_CACHE_DIR": str(tmp_path / "c")}
    with pytest.raises(RuntimeError, match=r"kernel gemm for dav-\d+(.|\n)*undefined symbol: main\nexit status 1"):
        Child(calls.gemm_row, environment).result()


def test_kernel_for_cores_of_another_kind(tmp_path):
    _copy_toolkit_to(tmp_path)
    compiler = tmp_path / "bin" / "bisheng"
    text = compiler.read_text()
    assert r"/\2, \1/p" in text
    compiler.write_text(text.replace(r"/\2, \1/p", r"/\2, vector/p"))
    environment = {"DEEPINFER_BISHENG": str(compiler), "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}
    with pytest.raises(RuntimeError, match=r"loading gemm: ACL error 100000 .*was loaded for cores of another kind"):
        Child(calls.gemm_row, environment).result()


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_damaged_object_in_the_cache(tmp_path, damage):
    """It is compiled again."""
    environment = {"DEEPINFER_CACHE_DIR": str(tmp_path)}
    Child(calls.gemm_row, environment).result()
    (entry,) = (tmp_path / "v1" / "entries").iterdir()
    binary = (entry / "kernel.o").read_bytes()
    if damage == "gone":
        (entry / "kernel.o").unlink()
    else:
        (entry / "kernel.o").write_bytes(binary[: len(binary) // 2] if damage == "cut" else b"")
    Child(calls.gemm_row, environment).result()
    (entry,) = (tmp_path / "v1" / "entries").iterdir()
    assert len((entry / "kernel.o").read_bytes()) == len(binary)


def test_processes_at_once_compile_once(tmp_path):
    _copy_toolkit_to(tmp_path)
    compiler, log = tmp_path / "bin" / "bisheng", tmp_path / "log"
    compiler.write_text(
        compiler.read_text().replace("#!/bin/sh", f'#!/bin/sh\n[ "$1" = --version ] || echo >> {log}', 1)
    )
    environment = {"DEEPINFER_BISHENG": str(compiler), "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}
    for child in [Child(calls.gemm_row, environment) for _ in range(3)]:
        child.result()
    assert log.read_text() == "\n"


def test_toolkit_version_is_part_of_the_key(tmp_path):
    home = tmp_path / "toolkit"
    shutil.copytree(os.environ["ASCEND_HOME_PATH"], home, symlinks=True)

    def identity() -> str:
        return jit.ascend_compiler().identity

    found = set()
    for version in ("9.0", "9.1"):
        (home / "version.cfg").write_text(f"version={version}\npath={home}\n")
        found.add(Child(identity, {"DEEPINFER_BISHENG": str(home / "bin" / "bisheng")}).result())
    assert len(found) == 2 and all(str(home) not in text for text in found)


def test_tensors_of_another_device():
    x, weight = torch.randn(5, 40), torch.randn(40)
    out = ops.rms_norm(x.to("npu:1"), weight.to("npu:1"), 1e-6)
    assert out.device == torch.device("npu:1") and torch.npu.current_device() == 0
    calls.close(out, ops.rms_norm(x, weight, 1e-6))
    with pytest.raises(ValueError, match="weight must be on the same device as the first argument"):
        ops.rms_norm(x.to("npu:1"), weight.to("npu:0"), 1e-6)


def test_tensors_inside_a_larger_allocation():
    storage = torch.full((4, 100), torch.nan).npu()
    x = torch.randn(4, 40)
    storage[:, 30:70] = x.npu()
    calls.close(ops.rms_norm(storage[:, 30:70], None, 1e-6, "none"), ops.rms_norm(x, None, 1e-6, "none"))


def _on_a_side_stream() -> None:
    x, weight = torch.randn(64, 512), torch.randn(512)
    expected = ops.rms_norm(x, weight, 1e-6)
    weight = weight.npu()
    torch.npu.synchronize()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        out = ops.rms_norm(x.npu(), weight, 1e-6)
        twice = ops.rms_norm(out, weight, 1e-6)
    event = torch.npu.Event()
    event.record(stream)
    event.synchronize()
    calls.close(out, expected)
    calls.close(twice, ops.rms_norm(expected, weight.cpu(), 1e-6))


@pytest.mark.parametrize("mode", ["direct", "delayed"])
@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_order_on_streams(mode, queue):
    """Also where torch_npu keeps operators in a queue of its own, and where a stream starts as late as it may."""
    code = "import test_host_path; test_host_path._on_a_side_stream()"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]]
    environment = {
        **os.environ,
        "TASK_QUEUE_ENABLE": queue,
        "DEEPINFER_STANDIN": mode,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_importing_the_package_imports_no_torch_npu():
    code = "import sys, torch_deepinfer; assert 'torch_npu' not in sys.modules"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_calls_that_the_stand_in_lacks_are_errors():
    import torch_npu

    x = torch.randn(2, 64).npu()
    with pytest.raises(RuntimeError, match=r"aclnnRmsNorm|aclopCompileAndExecute is not modelled"):
        torch_npu.npu_rms_norm(x, torch.ones(64).npu())


def test_empty_input_launches_nothing():
    out = ops.rms_norm(torch.empty(0, 7).npu(), None, 1e-6, "none")
    assert out.shape == (0, 7) and out.device.type == "npu"
    assert_bit_equal(ops.rms_norm(torch.zeros(1, 8).npu(), None, 1.0, "none"), torch.zeros(1, 8))


def test_doctor():
    """Chip, architecture, compiler and toolkit of the stand-in, as of any NPU."""
    command = [sys.executable, "-m", "torch_deepinfer.tools.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    home, arch = os.environ["ASCEND_HOME_PATH"], "dav-2201" if calls.OLD else "dav-3510"
    soc = os.environ.get("DEEPINFER_STANDIN_SOC", "Ascend950PR_9599")
    assert f"NPU              0: {soc}, kernels for {arch}\n" in done.stdout
    assert "NPU compiler     bisheng host model of the tests, " in done.stdout
    assert f", {home}\n" in done.stdout and "misses" not in done.stdout and "torch_npu        2." in done.stdout
