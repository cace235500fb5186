"""Build of the one native library, ``torch_deepinfer/libtorch_deepinfer.so``.

The library is written against torch's stable ABI and holds no Python API, so one build serves every supported torch and
Python. Only torch's headers and ``libtorch_cpu`` are needed to build; no CUDA toolkit.

Every file under ``csrc/cpu`` that holds kernels is compiled once per instruction set (see ``ISAS``) and the best one is
picked when the library is loaded. Ninja does the incremental part: a touched file rebuilds in seconds.

CUDA and NPU kernels (``csrc/cuda/*.cuh``, ``csrc/npu/*_kernel.h``) are not compiled here: they are package data,
compiled at run time by ``csrc/jit``.
"""

import importlib.util
import os
import platform
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
LIBRARY = "libtorch_deepinfer.so"

# TORCH_TARGET_VERSION: the oldest torch that the library has to load under (2.11).
COMMON_FLAGS = [
    "-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-Wno-unused-parameter", "-Wno-psabi",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # GCC 12 warns inside its own AVX-512 headers
    # The arithmetic of an op must not depend on the instruction set: no implicit fused multiply-add.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]  # fmt: skip
ISAS = {
    "x86_64": {
        "generic": ["-O2"],  # for processors older than AVX2: half the time to compile
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni",
                   "-mfma", "-mf16c", "-mbmi2", "-mprefer-vector-width=512"],
    },
}.get(platform.machine(), {"generic": []})  # fmt: skip


def torch_root() -> Path:
    """The installed torch, found without importing it.

    An isolated build environment hides the site-packages of the environment that pip runs in; torch is looked up there
    as well, so that ``pip wheel .`` needs neither ``--no-build-isolation`` nor a second download of torch.
    """
    spec = importlib.util.find_spec("torch")
    candidates = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    candidates += [Path(sysconfig.get_paths()[key]) / "torch" for key in ("purelib", "platlib")]
    for root in candidates:
        if (root / "include/torch/csrc/stable/library.h").exists():
            return root
    raise SystemExit("torch_deepinfer: building needs torch >= 2.11 in this environment: pip install 'torch>=2.11'")


def ninja_file(build_dir: Path) -> str:
    torch = torch_root()
    include = f"-I{CSRC} -isystem {torch / 'include'}"
    rules = [
        f"flags = {' '.join(COMMON_FLAGS)} {include}",
        f"cxx = {os.environ.get('CXX', 'g++')}",
        "rule cc\n  command = $cxx -MMD -MF $out.d $flags $isa -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = $cxx -shared -o $out $in -L{torch / 'lib'} -ltorch_cpu -ldl -lpthread",
    ]
    objects = []

    def compile_source(source: Path, isa: str = "", flags: str = "") -> None:
        name = source.relative_to(CSRC).as_posix().replace("/", "_") + (f".{isa}" if isa else "") + ".o"
        rules.append(f"build {name}: cc {source}\n  isa = {flags}")
        objects.append(name)

    host_sources = [source for folder in ("ops", "jit", "cuda", "npu") for source in CSRC.glob(f"{folder}/*.cpp")]
    for source in sorted([*host_sources, CSRC / "cpu/isa.cpp"]):
        compile_source(source)
    for source in sorted(set(CSRC.glob("cpu/*.cpp")) - {CSRC / "cpu/isa.cpp"}):
        for isa, flags in ISAS.items():
            compile_source(source, isa, " ".join([f"-DDEEPINFER_ISA={isa}", f"-DDEEPINFER_ISA_{isa.upper()}", *flags]))
    rules.append(f"build {LIBRARY}: link {' '.join(objects)}")
    return "\n".join(rules) + "\n"


class BuildLibrary(build_ext):
    """Runs ninja and puts the library where setuptools expects an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        build_dir = ROOT / "build" / f"native-{platform.machine()}"
        build_dir.mkdir(parents=True, exist_ok=True)
        (build_dir / "build.ninja").write_text(ninja_file(build_dir))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(["ninja", "-C", str(build_dir), "-j", jobs], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build_dir / LIBRARY), str(target))


class WheelForAnyPython(bdist_wheel):
    """The library has no Python API: one wheel for every Python 3."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    packages=find_packages(include=["torch_deepinfer*"]),
    ext_modules=[Extension("torch_deepinfer.libtorch_deepinfer", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForAnyPython},
    zip_safe=False,
)
