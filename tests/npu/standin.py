"""Builds what takes the place of an NPU in the tests: a CANN toolkit of the tests' own in ``build/npu``.

    build/npu/bin/bisheng, ld.lld    have the shape of the compiler and its linker
    build/npu/include                the model of a core, as kernel_operator.h
    build/npu/lib                    the stand-in runtime under the names of CANN's libraries

``python tests/npu/standin.py`` builds it and prints the folder. g++ is all it takes.
"""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent.resolve()
HOME = HERE.parents[1] / "build" / "npu"
NAMES = ["hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi"]
FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off", "-fPIC"]
KERNEL_FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wno-unused-variable", "-ffp-contract=off", "-fPIC"]


def build(home: Path = HOME) -> Path:
    """The toolkit's folder, made anew where a source is newer."""
    sources = [*sorted(HERE.glob("runtime/*.cpp")), HERE / "twin/machine.cpp"]
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
    subprocess.run(["g++", *KERNEL_FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    fresh = library.with_suffix(f".{os.getpid()}")
    subprocess.run(
        ["g++", *FLAGS, "-shared", "-Wl,-soname,libascendcl.so", *map(str, sources), "-o", str(fresh), "-ldl"],
        check=True,
    )
    fresh.rename(library)
    return home


if __name__ == "__main__":
    print(build())
