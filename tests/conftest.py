"""Shared by all tests: the devices that an op test runs on."""

import pytest
import torch

import torch_deepinfer  # noqa: F401

_no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _no_gpu])])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that ops run on; those that this machine lacks are skipped with the reason."""
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of run-time compilation fork, so they come before any that starts CUDA."""
    items.sort(key=lambda item: item.path.name != "test_jit.py")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
