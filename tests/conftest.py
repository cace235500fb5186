"""Shared by all tests: the devices that an op test runs on, and how it runs."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_deepinfer  # noqa: F401

# The families that have NPU kernels, by their test files, and the faults seeded into these; of how many tests one is
# run. Each format of a quantised op is a kernel of its own, which takes a second to compile.
NPU_FAMILIES = {
    "test_norm": 1, "test_norm_quant": 16, "test_activation": 2, "test_activation_quant": 2, "test_moe_dispatch": 2,
    "test_moe_router": 2, "test_moe_scaled": 1, "test_quant": 6, "test_quant_formats": 6, "test_rope": 1,
    "test_rope_qk_norm": 3, "test_gemm": 1, "test_topk": 1, "test_mutants": 1,
}  # fmt: skip

# In this order, before any other file starts a device: kernels that are loaded already would not be compiled again.
FORKING = ["test_jit.py", "test_mutants.py", "test_host_path.py", "test_reports.py"]

STANDIN = os.environ.get("DEEPINFER_STANDIN")  # set where tests/npu/standin.py takes the place of an NPU

_no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
_no_npu = pytest.mark.skipif(
    not (hasattr(torch, "npu") and torch.npu.is_available()),
    reason="no Ascend NPU here, nor the stand-in of `make test-npu`",
)

if STANDIN:
    sys.path.insert(0, str(Path(__file__).parent / "npu"))
    from fallback import install

    _aten_on_cpu = install()


def pytest_report_header() -> str | None:
    if STANDIN:
        return "npu: THE STAND-IN of tests/npu: kernels run on a host model of a core, nothing on Ascend silicon"
    return None


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, _no_gpu]),
        pytest.param("npu", marks=[pytest.mark.npu, _no_npu]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Every device that ops run on; those that this machine lacks are skipped with the reason."""
    if request.param == "npu" and request.path.stem not in NPU_FAMILIES:
        pytest.skip("no NPU kernels of this family")
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--npu-sample", type=int, default=1, help="run every n-th of the op tests on an NPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests that fork come before any that starts a device."""
    dropped: set[pytest.Item] = set()
    for family, share in NPU_FAMILIES.items():
        on_npu = [item for item in items if item.path.stem == family and item.get_closest_marker("npu")]
        dropped.update(set(on_npu) - set(on_npu[:: share * config.getoption("--npu-sample")]))
    items[:] = [item for item in items if item not in dropped]
    gc.collect()
    gc.freeze()  # modules and tests stay: no need to look at them again and again
    items.sort(key=lambda item: FORKING.index(item.path.name) if item.path.name in FORKING else len(FORKING))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Formats that the NPU at hand does not know: the op says so."""
    try:
        return (yield)
    except Exception as error:
        if "on an NPU without float8" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For thousands of tiny products: handing them to other threads takes longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def force_tiling():
    """Products with these tiles from now on, until the test ends."""
    yield torch.ops.deepinfer._gemm_force_tiling
    torch.ops.deepinfer._gemm_force_tiling(*[0] * 7)
