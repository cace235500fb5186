"""Run-time compilation without a GPU: compilers, the cache and what may go wrong. Launching: test_jit_launch.py.

Everything runs in forked children, each a process with its own environment and nothing compiled yet.
"""

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forking import Child, in_child

from torch_deepinfer import jit

NATIVE = Path(__file__).parent / "native"
KERNEL = jit.Kernel("copy_rows", "// a kernel\n")
MISSING = "/nonexistent/libnvrtc.so"


@pytest.fixture
def fake(tmp_path):
    """The environment of a process that compiles with a stand-in for nvcc into an empty cache."""
    return {
        "DEEPINFER_JIT_COMPILER": "nvcc",
        "DEEPINFER_NVCC": str(NATIVE / "fake_nvcc.sh"),
        "DEEPINFER_CACHE_DIR": str(tmp_path / "cache"),
        "FAKE_NVCC_LOG": str(tmp_path / "log"),
    }


@pytest.fixture
def real(tmp_path):
    """The environment of a process that compiles with NVRTC into an empty cache."""
    return {"DEEPINFER_JIT_COMPILER": "nvrtc", "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}


def compile_in_child(environment, kernel=KERNEL, arch="sm_90a", flags=""):
    return in_child(lambda: jit.compile(kernel, arch, flags), environment)


def compilations(environment):
    log = Path(environment["FAKE_NVCC_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


# ---- real compilers ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_kernel_compiles(real, arch):
    kernels = jit.samples() if arch != "sm_80" else jit.samples()[:2]
    assert kernels

    def compile_all():
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda kernel: jit.compile(kernel, arch, "--ptxas-options=-v"), kernels))

    for kernel, result in zip(kernels, in_child(compile_all, real), strict=True):
        assert result.origin == "compiled"
        assert "warning" not in result.log and "serialized" not in result.log, f"{kernel.source}\n{result.log}"
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", result.log), f"{kernel.source}\n{result.log}"


nvcc = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(nvcc is None, reason="no nvcc here")


@needs_nvcc
def test_nvcc_by_choice(real):
    result = compile_in_child(real | {"DEEPINFER_JIT_COMPILER": "nvcc"}, jit.samples()[0])
    assert result.origin == "compiled"
    assert "compiler: nvcc" in (Path(result.path) / "manifest.txt").read_text()


@needs_nvcc
@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_a_cached_source_compiles_by_hand(real, compiler, tmp_path):
    result = compile_in_child(real | {"DEEPINFER_JIT_COMPILER": compiler}, jit.samples()[0])
    manifest = (Path(result.path) / "manifest.txt").read_text()
    command = re.search(r"^command: (.*)$", manifest, re.MULTILINE)
    shutil.copy(Path(result.path) / "kernel.cu", tmp_path)
    subprocess.run(command[1], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / f"{jit.samples()[0].name}.cubin").stat().st_size > 1000


def test_the_generated_source_names_every_fact():
    source = jit.samples()[0].source
    assert '#include "cuda/' in source
    assert re.search(r"config\{\n(    \.\w+ = [\w:]+,\n)+\};", source)
    assert re.search(r'extern "C" __global__ void __launch_bounds__\(\d+\)', source)


# ---- what fails, and what it says ----


def test_unknown_architecture(real):
    with pytest.raises(RuntimeError, match=r"(?s)copy_rows for sm_77 with nvrtc.*does not know.*sm_77, only.* sm_90"):
        compile_in_child(real, arch="sm_77")


@pytest.mark.parametrize("arch", ["", "90", "sm_", "sm_9", "sm_90x", "sm_90a -o x", "compute_90"])
def test_malformed_architecture(fake, arch):
    with pytest.raises(ValueError, match="an architecture is written like sm_90a"):
        compile_in_child(fake, arch=arch)
    assert compilations(fake) == 0


def test_malformed_kernel_name(fake):
    with pytest.raises(ValueError, match="a kernel needs a C name"):
        compile_in_child(fake, jit.Kernel("../x", ""))


def test_a_kernel_that_does_not_compile(real):
    with pytest.raises(RuntimeError) as failure:
        compile_in_child(real, jit.Kernel("broken", "__global__ void f() { undeclared = 1; }"))
    for part in ["kernel broken for sm_90a", 'identifier "undeclared" is undefined', "command: nvcc", "compute_90a"]:
        assert part in str(failure.value)


def test_a_failing_nvcc(fake):
    with pytest.raises(RuntimeError, match=r"(?s)kernel bad for sm_90a.*that is wrong.*exit status 2.*command: .*fake"):
        compile_in_child(fake, jit.Kernel("bad", "// be wrong"))
    with pytest.raises(RuntimeError, match="exit status 137"):
        compile_in_child(fake, jit.Kernel("bad", "// be killed"))


def test_a_failure_is_tried_again(fake):
    def twice():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                jit.compile(jit.Kernel("bad", "// be wrong"), "sm_90a")

    in_child(twice, fake)
    assert compilations(fake) == 2


def test_a_missing_header(fake):
    with pytest.raises(RuntimeError, match=r"kernel header cuda/none\.cuh is missing in .*csrc"):
        compile_in_child(fake, jit.Kernel("lost", '#include "cuda/none.cuh"\n'))


def test_no_nvrtc(real):
    with pytest.raises(RuntimeError) as failure:
        compile_in_child(real | {"DEEPINFER_NVRTC": MISSING})
    for part in ["found no NVRTC", "pip install nvidia-cuda-nvrtc", "CUDA_HOME", MISSING]:
        assert part in str(failure.value)


def test_no_compiler_at_all():
    nothing = {"DEEPINFER_JIT_COMPILER": "", "DEEPINFER_NVRTC": MISSING, "DEEPINFER_NVCC": "/nonexistent/nvcc"}
    with pytest.raises(RuntimeError, match="found no NVRTC and no nvcc"):
        compile_in_child(nothing)
    assert in_child(jit.available, nothing) is False


def test_unknown_compiler():
    with pytest.raises(ValueError, match="DEEPINFER_JIT_COMPILER must be nvrtc or nvcc, got clang"):
        compile_in_child({"DEEPINFER_JIT_COMPILER": "clang"})


# ---- the cache ----


def test_found_on_disk_by_another_process(fake):
    first, second = compile_in_child(fake), compile_in_child(fake)
    assert (first.origin, second.origin) == ("compiled", "disk")
    assert first.path == second.path
    assert sorted(os.listdir(first.path)) == ["kernel.cu", "kernel.cubin", "manifest.txt"]
    assert (Path(first.path) / "kernel.cu").read_text() == KERNEL.source


def test_what_the_key_depends_on(fake, tmp_path):
    root = tmp_path / "csrc"
    (root / "cuda").mkdir(parents=True)
    (root / "cuda/a.cuh").write_text('#include "../b.h"\n')
    (root / "b.h").write_text("// one\n")
    kernel = jit.Kernel("copy_rows", '  # include "cuda/a.cuh"\n')
    fake = fake | {"DEEPINFER_SOURCE_DIR": str(root)}

    def origin(kernel=kernel, arch="sm_90a", flags="", **environment):
        return compile_in_child(fake | environment, kernel, arch, flags).origin

    assert origin() == "compiled"
    assert origin() == "disk"
    assert origin(kernel=kernel._replace(source=kernel.source + "\n")) == "compiled"
    assert origin(kernel=kernel._replace(name="other")) == "compiled"
    assert origin(arch="sm_100a") == "compiled"
    assert origin(flags="-lineinfo") == "compiled"
    assert origin(FAKE_NVCC_VERSION="2") == "compiled"
    assert origin(NVCC_APPEND_FLAGS="-g") == "compiled"
    (root / "b.h").write_text("// two\n")  # included by what is included
    assert origin() == "compiled"
    shutil.copytree(root, tmp_path / "moved")
    assert origin(DEEPINFER_SOURCE_DIR=str(tmp_path / "moved")) == "disk"


@pytest.mark.parametrize("file", ["kernel.cubin", "manifest.txt"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "gone"])
def test_damaged_entry(fake, file, damage):
    path = Path(compile_in_child(fake).path) / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[: len(content) // 8], "garbage": os.urandom(100), "empty": b""}[damage])
    assert compile_in_child(fake).origin == "compiled"
    assert compile_in_child(fake).origin == "disk"


def test_a_file_in_the_place_of_an_entry(fake):
    path = Path(compile_in_child(fake).path)
    shutil.rmtree(path)
    path.write_text("in the way")
    assert compile_in_child(fake).origin == "compiled"
    assert compile_in_child(fake).origin == "disk"


def test_eight_processes_on_an_empty_cache(fake):
    start = time.time() + 0.2

    def compile_at_start():
        time.sleep(max(0, start - time.time()))
        return jit.compile(jit.Kernel("copy_rows", "// be slow\n"), "sm_90a")

    results = [child.result() for child in [Child(compile_at_start, fake) for _ in range(8)]]
    assert sorted(result.origin for result in results) == ["compiled"] + ["disk"] * 7
    assert compilations(fake) == 1


def test_eight_threads(fake):
    def compile_in_threads():
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda _: jit.compile(jit.Kernel("copy_rows", "// be slow\n"), "sm_90a"), range(8)))

    results = in_child(compile_in_threads, fake)
    assert sorted(result.origin for result in results) == ["compiled"] + ["memory"] * 7
    assert compilations(fake) == 1


def test_fork_while_compiling(fake):
    slow = jit.Kernel("copy_rows", "// be slow\n")

    def fork_meanwhile():
        with ThreadPoolExecutor(1) as pool:
            parent = pool.submit(jit.compile, slow, "sm_90a")
            time.sleep(0.2)
            child = in_child(lambda: jit.compile(slow, "sm_90a"))
            return parent.result().origin, child.origin

    assert in_child(fork_meanwhile, fake) == ("compiled", "disk")


@pytest.fixture(scope="session")
def faults(tmp_path_factory):
    library = tmp_path_factory.mktemp("native") / "faults.so"
    compiler = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O1", "-Wall"]
    subprocess.run([*compiler, NATIVE / "faults.c", "-o", library, "-ldl"], check=True)
    return str(library)


@pytest.mark.parametrize("error", [0, errno.ENOSPC, errno.EROFS], ids=["killed writer", "full disk", "read-only root"])
def test_faults_at_every_step_of_a_write(fake, faults, tmp_path, error):
    root = tmp_path / "faulty"
    root.mkdir()
    environment = os.environ | fake | {"LD_PRELOAD": faults, "FAULT_ROOT": str(root), "DEEPINFER_CACHE_DIR": str(root)}
    worker = Path(__file__).with_name("fault_worker.py")
    subprocess.run([sys.executable, worker, str(error)], env=environment, check=True, timeout=300)


def test_a_file_size_limit(real):
    kernel = jit.samples()[0]

    def compile_limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return jit.compile(kernel, "sm_90a")

    limited = in_child(compile_limited, real)
    assert (limited.origin, limited.path) == ("compiled", "")
    unlimited = compile_in_child(real, kernel)
    assert unlimited.origin == "compiled"
    assert Path(unlimited.path, "kernel.cubin").stat().st_size > 4096


def test_roots_that_cannot_be_made(fake, tmp_path):
    (tmp_path / "file").write_text("")
    useless = f"{tmp_path}/file/a:/proc/none"
    result = compile_in_child(fake | {"DEEPINFER_CACHE_DIR": useless})
    assert (result.origin, result.path) == ("compiled", "")
    second = compile_in_child(fake | {"DEEPINFER_CACHE_DIR": f"{useless}:{tmp_path}/second"})
    assert second.path.startswith(f"{tmp_path}/second/")


def test_all_roots_are_searched(fake, tmp_path):
    compile_in_child(fake | {"DEEPINFER_CACHE_DIR": f"{tmp_path}/shared"})
    result = compile_in_child(fake | {"DEEPINFER_CACHE_DIR": f"{tmp_path}/own:{tmp_path}/shared"})
    assert result.origin == "disk"
    assert result.path.startswith(f"{tmp_path}/shared/")


def test_default_root(fake, tmp_path):
    home = fake | {"DEEPINFER_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": str(tmp_path)}
    assert in_child(jit.cache_roots, home) == [tmp_path / ".cache/torch_deepinfer"]


def test_eviction_of_the_least_recently_used(fake):
    kernels = [jit.Kernel(f"k{i}", f"// {i}\n" + "//" * 5000) for i in range(4)]
    paths = []
    for kernel in kernels[:3]:
        paths.append(Path(compile_in_child(fake, kernel).path))
        time.sleep(0.01)
    compile_in_child(fake, kernels[0])  # from disk: now k1 is the oldest
    size = sum(file.stat().st_size for file in paths[0].iterdir())
    limit = {"DEEPINFER_CACHE_SIZE": str(3 * size + size // 2)}
    paths.append(Path(compile_in_child(fake | limit, kernels[3]).path))
    assert [path.exists() for path in paths] == [True, False, True, True]
    last = compile_in_child(fake | {"DEEPINFER_CACHE_SIZE": "1K"}, kernels[1])
    assert [path.exists() for path in paths] == [False, True, False, False]
    assert Path(last.path) == paths[1]  # larger than the limit, yet of use to the next process


@pytest.mark.parametrize("size", ["much", "1T", "-1", "1.5G", "99999999999G"])
def test_malformed_cache_size(fake, size):
    with pytest.raises(ValueError, match="DEEPINFER_CACHE_SIZE must be a number of bytes.* got " + re.escape(size)):
        compile_in_child(fake | {"DEEPINFER_CACHE_SIZE": size})


def test_cache_size_suffixes():
    sizes = {"": 1 << 30, "5": 5, "2K": 2048, "3M": 3 << 20, "4G": 4 << 30}
    for text, size in sizes.items():
        assert in_child(jit.cache_size_limit, {"DEEPINFER_CACHE_SIZE": text}) == size


def test_leftovers_of_dead_writers_go(fake):
    root = Path(fake["DEEPINFER_CACHE_DIR"])
    for name, age in {"old": 7200, "young": 60}.items():
        (root / "v1/tmp" / name / "entry").mkdir(parents=True)
        os.utime(root / "v1/tmp" / name, (time.time() - age,) * 2)
    compile_in_child(fake)
    assert os.listdir(root / "v1/tmp") == ["young"]


# ---- the command line ----


def run_cli(environment, *arguments):
    command = [sys.executable, "-m", "torch_deepinfer.tools.cli", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_cli_cache(fake):
    path = compile_in_child(fake).path
    assert run_cli(fake, "cache", "dir") == (0, fake["DEEPINFER_CACHE_DIR"] + "\n", "")
    status, out, _ = run_cli(fake, "cache", "list")
    assert status == 0
    assert re.search(rf"copy_rows +sm_90a .*{path}", out)
    assert "1 kernels" in out
    assert run_cli(fake, "cache", "clear") == (0, "removed 1 kernels\n", "")
    assert compile_in_child(fake).origin == "compiled"


def test_cli_warmup(fake):
    count = len(jit.samples())
    status, out, _ = run_cli(fake, "cache", "warmup", "--arch", "sm_90a", "--arch", "sm_100a", "--jobs", "2")
    assert status == 0
    assert f"sm_90a, sm_100a: compiled {2 * count} kernels" in out
    status, out, _ = run_cli(fake, "cache", "warmup", "--arch", "sm_90a")
    assert status == 0
    assert f"{count} were there, 0 failed" in out
    status, out, err = run_cli(fake, "cache", "warmup", "--arch", "sm90")
    assert status == 1
    assert f"{count} failed" in out and "written like sm_90a or dav-2201, got sm90" in err


def test_cli_doctor(fake):
    status, out, _ = run_cli(fake, "doctor")
    assert status == 0
    assert re.search(r"CUDA compiler +nvcc Build fake 1, .*fake_nvcc.sh", out)
    assert re.search(rf"kernel cache +{fake['DEEPINFER_CACHE_DIR']}: 0 kernels", out)
    status, out, _ = run_cli({"DEEPINFER_NVRTC": MISSING, "DEEPINFER_JIT_COMPILER": "nvrtc"}, "doctor")
    assert status == 0
    assert "pip install nvidia-cuda-nvrtc" in out


# vllm-ascend#117, MinerU#2537: which of torch, torch_npu and CANN does not fit the others.
def test_cli_doctor_of_an_npu(fake, tmp_path, monkeypatch):
    """Every state of a machine is told, none ends the report."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    status, out, _ = run_cli({**fake, "HOME": str(tmp_path)}, "doctor")
    assert status == 0
    assert "torch_npu        not installed" in out and re.search(r"\nCANN +none: neither ASCEND_HOME_PATH", out)
    assert re.search(r"\nNPU compiler +none: it comes with CANN", out) and re.search(
        r"\nNPU +none: no /dev/davinci0", out
    )

    installed = tmp_path / "site" / "torch_npu-9.9.9.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9.9\n")
    toolkit = tmp_path / "cann"
    (toolkit / "runtime").mkdir(parents=True)
    (toolkit / "version.cfg").write_text("# of parts\nversion=[9.1.0:9.1.0]\n")
    (tmp_path / "libhccl.so").touch()
    path = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**fake, "PYTHONPATH": path, "ASCEND_HOME_PATH": str(toolkit), "LD_LIBRARY_PATH": str(tmp_path)}
    status, out, _ = run_cli(environment, "doctor")
    assert status == 0
    assert "torch_npu        9.9.9\n                 does not fit torch " in out
    assert "misses libascendcl.so, libacl_op_compiler.so" in out and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in out
    assert f"version 9.1.0:9.1.0, {toolkit}" in out and "incomplete: no compiler, opp in it" in out

    status, out, _ = run_cli({**fake, "ASCEND_HOME_PATH": "/nowhere"}, "doctor")
    assert status == 0 and "ASCEND_HOME_PATH is /nowhere, which is no folder" in out
