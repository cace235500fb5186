"""Builds what takes the place of an NPU in the tests: a CANN toolkit of the tests' own in ``build/npu``.

    build/npu/bin/bisheng, ld.lld    have the shape of the compiler and its linker
    build/npu/include                the model of a core, as kernel_operator.h
    build/npu/lib                    the stand-in runtime under the names of CANN's libraries

``python tests/npu/standin.py -m pytest -m npu`` builds it, with g++ alone, and starts this Python with these arguments
in an environment in which torch_npu finds the stand-in. ``DEEPINFER_STANDIN_SOC`` chooses the chip.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.resolve()
HOME = HERE.parents[1] / "build" / "npu"
NAMES = ["hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
FLAGS = ["-std=c++20", "-O3", "-march=native", *WARNINGS, "-ffp-contract=off", "-fPIC"]
KERNEL_FLAGS = ["-std=c++20", "-O0", "-Wall", "-Wno-unused-variable", "-ffp-contract=off", "-fPIC"]


def build(home: Path = HOME) -> Path:
    """The toolkit's folder, made anew where a source is newer."""
    sources = [*sorted(HERE.glob("runtime/*.cpp")), *sorted(HERE.glob("twin/*.cpp"))]
    headers = [*HERE.glob("runtime/*.h"), *HERE.glob("twin/*.h")]
    library = home / "lib" / "libascendcl.so"
    tools = list(HERE.glob("toolkit/bin/*"))
    newest = max(path.stat().st_mtime for path in [*sources, *headers, *tools])
    if library.exists() and library.stat().st_mtime > newest:
        return home
    for folder in ("bin", "lib", "include", "runtime", "compiler", "opp"):  # torch_npu looks for the last three
        (home / folder).mkdir(parents=True, exist_ok=True)
    for tool in tools:
        shutil.copy2(tool, home / "bin")
    for header in HERE.glob("twin/*.h"):
        shutil.copy2(header, home / "include")
    for name in NAMES:
        link = home / "lib" / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    include = home / "include"
    (include / "flags").write_text(" ".join(KERNEL_FLAGS))
    header = str(include / "kernel_operator.h")
    subprocess.run(["g++", *KERNEL_FLAGS, "-w", "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    shutil.rmtree(home / "cache", ignore_errors=True)  # kernels that an older model has compiled
    fresh = library.with_suffix(f".{os.getpid()}")
    subprocess.run(
        ["g++", *FLAGS, "-shared", "-Wl,-soname,libascendcl.so", *map(str, sources), "-o", str(fresh), "-ldl"],
        check=True,
    )
    fresh.rename(library)
    return home


def environment(home: Path) -> dict[str, str]:
    """Variables under which torch_npu and torch_deepinfer take the stand-in for a machine with an NPU."""
    root = str(HERE.parents[1])
    libraries = [str(home / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "0"),  # errors where they arise
        "OMP_NUM_THREADS": "1",
        "DEEPINFER_STANDIN": os.environ.get("DEEPINFER_STANDIN", "direct"),
        "DEEPINFER_CACHE_DIR": str(home / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **environment(build())})
