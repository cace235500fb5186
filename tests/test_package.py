"""What holds for the package as a whole and for every op alike."""

import importlib
import inspect
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from checking import assert_bit_equal, opcheck
from samples import DIFFERENTIABLE, SAMPLES

import torch_deepinfer
from torch_deepinfer import ops

ROOT = Path(__file__).parent.parent
LIBRARY = Path(torch_deepinfer.__file__).with_name("libtorch_deepinfer.so")
NAMES = sorted(
    name.removeprefix("deepinfer::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("deepinfer::") and not name.startswith("deepinfer::_")
)
every_op = pytest.mark.parametrize("name", NAMES)


def op_of(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.deepinfer, name).default


def outputs(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def call(function, name: str, device: str = "cpu", requires_grad: bool = False) -> list[torch.Tensor]:
    """What the op's sample gives: its results, or for an in-place op the arguments that it wrote."""

    def prepare(a):
        if not isinstance(a, torch.Tensor):
            return a
        return a.to(device).requires_grad_(requires_grad and a.is_floating_point())

    torch.manual_seed(0)
    args, kwargs = SAMPLES[name]()
    args, kwargs = tuple(map(prepare, args)), {key: prepare(a) for key, a in kwargs.items()}
    result = function(*args, **kwargs)
    if result is not None:
        return outputs(result)
    written = op_of(name)._schema.arguments
    return [args[i] for i, argument in enumerate(written) if argument.is_write]


def run_python(code: str, *path: Path) -> str:
    """Standard output of a fresh interpreter that sees the packages under ``path`` first."""
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", check=True, text=True, capture_output=True
    ).stdout


# ---- every op is whole ----


def test_ops_are_public():
    assert sorted(ops.__all__) == NAMES


@every_op
def test_op_has_all_its_parts(name):
    function = getattr(ops, name)
    family = function.__module__.rpartition(".")[2]
    for pattern in ("csrc/ops/{}*.cpp", "csrc/cpu/{}*.cpp", "csrc/cpu/{}*.h"):
        assert list(ROOT.glob(pattern.format(family))), pattern
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"deepinfer::{name}", key), key
    assert function.__doc__ and "Raises:" in function.__doc__
    reference = importlib.import_module(f"torch_deepinfer.reference.{family}")
    assert inspect.signature(getattr(reference, name)) == inspect.signature(function)
    assert f"| `{name}` |" in (ROOT / "docs" / "ops.md").read_text()
    tests = [file.read_text() for file in (ROOT / "tests").glob(f"test_{family}*.py")]
    assert any(re.search(rf"torch\.ops\.deepinfer\.{name}\b", text) and "opcheck(" in text for text in tests)


@every_op
def test_function_has_the_signature_of_the_schema(name):
    schema = op_of(name)._schema
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        assert (parameter.default is not parameter.empty) == argument.has_default_value(), argument.name
        if argument.has_default_value():
            default = parameter.default
            assert (list(default) if isinstance(default, tuple) else default) == argument.default_value


@every_op
def test_sample_passes_opcheck(name):
    opcheck(op_of(name), *SAMPLES[name]())


@every_op
def test_sample_matches_reference(name):
    family = getattr(ops, name).__module__.rpartition(".")[2]
    reference = importlib.import_module(f"torch_deepinfer.reference.{family}")
    actual, expected = call(getattr(ops, name), name), call(getattr(reference, name), name)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a.float(), e.float(), rtol=2**-7, atol=2**-7)


@every_op
def test_meta_tensors(name):
    for actual, expected in zip(call(op_of(name), name, "meta"), call(op_of(name), name), strict=True):
        assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())


# torch-harmonics#246: no rule depends on a device or on a context.
@every_op
def test_contexts(name):
    expected = call(op_of(name), name)
    contexts = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "bfloat16 autocast": torch.autocast("cpu", torch.bfloat16),
        "float16 autocast": torch.autocast("cpu", torch.float16),
    }
    for label, context in contexts.items():
        with context:
            actual = call(op_of(name), name)
        for a, e in zip(actual, expected, strict=True):
            assert_bit_equal(a, e, label)
            assert a.is_inference() == (label == "inference_mode")


@every_op
def test_gradients(name):
    if name.endswith("_"):
        with pytest.raises(RuntimeError, match="must not require"):
            call(getattr(ops, name), name, requires_grad=True)
        with torch.no_grad():
            call(getattr(ops, name), name, requires_grad=True)
        return
    results = call(op_of(name), name, requires_grad=True)
    for result, expected in zip(results, call(op_of(name), name), strict=True):
        assert_bit_equal(result.detach(), expected)
        assert result.requires_grad == (name in DIFFERENTIABLE)


@every_op
def test_several_threads(name):
    expected = call(op_of(name), name)
    torch.manual_seed(0)
    args, kwargs = SAMPLES[name]()
    results, errors = [], []

    def work() -> None:
        try:
            for _ in range(20):
                own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                result = op_of(name)(*own, **kwargs)
                results.append(outputs(result) if result is not None else own[: len(expected)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 80
    for result in results:
        for a, e in zip(result, expected, strict=True):
            assert_bit_equal(a, e)


# ---- import ----


def test_import_is_light():
    """Loads nothing but itself beyond what torch has loaded, and touches no device."""
    loaded = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import torch_deepinfer\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*sorted(set(sys.modules) - before))",
        ROOT,
    ).split()
    assert "torch_deepinfer.ops" in loaded
    standard_library = sys.stdlib_module_names
    assert [m for m in loaded if m.split(".")[0] not in {"torch_deepinfer", *standard_library}] == []
    assert len(loaded) < 40


# ---- the library and the wheel ----


@pytest.mark.skipif(not shutil.which("readelf") or not shutil.which("nm"), reason="binutils are not installed")
def test_library_needs_only_the_stable_abi():
    dynamic = subprocess.run(["readelf", "-d", LIBRARY], check=True, text=True, capture_output=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    torch_libraries = [library for library in needed if "torch" in library or "c10" in library]
    assert torch_libraries == ["libtorch_cpu.so"]
    assert not [library for library in needed if "python" in library or "cuda" in library]
    symbols = subprocess.run(
        ["nm", "-D", "-C", "--undefined-only", LIBRARY], check=True, text=True, capture_output=True
    ).stdout
    assert "aoti_torch_" in symbols
    assert not re.findall(r"U (?:_?Py[A-Z_]\w*|(?:at|c10|torch)::.*)", symbols)


@pytest.mark.slow
def test_wheel(tmp_path):
    """Built from a clean copy, the wheel suits any Python 3, holds all parts and works where it is installed."""
    source, built, installed = tmp_path / "source", tmp_path / "built", tmp_path / "installed"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, text=True, capture_output=True).stdout
    for file in tracked.splitlines():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", built], check=True)
    (wheel,) = built.iterdir()
    version = torch_deepinfer.__version__
    assert wheel.name == f"torch_deepinfer-{version}-py3-none-linux_{platform.machine()}.whl"
    files = set(zipfile.ZipFile(wheel).namelist())
    parts = ("torch_deepinfer/", "inductor/", "csrc/cuda/")  # the sources of CUDA kernels are compiled at run time
    needed = [f for f in tracked.splitlines() if f.endswith((".py", ".cuh", ".h")) and f.startswith(parts)]
    needed = {f if f.startswith("torch_deepinfer/") else f"torch_deepinfer/{f}" for f in needed}
    assert needed <= files and "torch_deepinfer/inductor/__init__.py" in needed
    assert {"torch_deepinfer/libtorch_deepinfer.so", "torch_deepinfer/py.typed"} <= files
    assert not [f for f in files if f.startswith(("tests", "benchmarks", "inductor"))]

    subprocess.run([*pip, "install", "--target", installed, "--no-deps", wheel], check=True)
    answer = run_python(
        "import torch, torch_deepinfer, torch_deepinfer.inductor\n"
        "from importlib.metadata import entry_points\n"
        "x = torch.ones(2, 4)\n"
        "print(torch_deepinfer.__file__)\n"
        "print(torch.ops.deepinfer.rms_norm(x, None, 0.0, 'none').tolist() == x.tolist())\n"
        "print(*(e.value for e in entry_points(group='torch_dynamo_backends') if e.name == 'deepinfer'))",
        installed,
    ).splitlines()
    assert answer[0] == str(installed / "torch_deepinfer" / "__init__.py")
    assert answer[1] == "True"
    assert "torch_deepinfer.inductor.backend:deepinfer" in answer[2]
