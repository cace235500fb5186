"""Launches without a GPU, on native/fake_driver.c. Run by test_jit_launch.py, one scenario a process.

The record of the fake driver shows what a launch came to; kernels are compiled by NVRTC as usual.
"""

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forking import in_child

torch.ops.load_library(os.environ["PROBE_LIBRARY"])
launch = torch.ops.deepinfer_probe.launch
driver = ctypes.CDLL(None)
driver.fake_record.restype = ctypes.c_char_p


def record() -> list[str]:
    return driver.fake_record().decode().splitlines()


def configuration() -> None:
    launch(0, 7, 2, 1000)
    assert record() == [
        "load probe in 100",
        "attribute 8 = 1000",  # dynamic shared memory
        # [4] the cluster, [6] programmatic dependent launch
        "launch 7 of 128, shared 1000, stream 200, context 100 of 100, argument 1234, [4] = 2, [6] = 1",
    ]
    launch(0, 7, 1, 0)
    assert record()[-1].endswith("shared 0, stream 200, context 100 of 100, argument 1234, [6] = 1")
    launch(0, 0, 1, 0)  # an empty grid
    assert len(record()) == 5


def attributes() -> None:
    launch(0, 1, 1, 49152)
    launch(0, 1, 16, 100000)
    attributes = [line for line in record() if line.startswith("attribute")]
    assert attributes == ["attribute 8 = 49152", "attribute 8 = 100000", "attribute 14 = 1"]
    with pytest.raises(RuntimeError, match=r"probe with 400000 bytes of shared memory: CUDA_ERROR_X \(as the fake"):
        launch(0, 1, 1, 400000)


def loaded_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: launch(0, 1, 1, 0), range(50)))
    assert driver.fake_modules_loaded() == 1
    for shared_bytes in range(4, 404, 4):
        launch(0, 1, 1, shared_bytes)
    assert driver.fake_modules_loaded() == 101
    launch(0, 1, 1, 200)
    assert driver.fake_modules_loaded() == 101


def two_devices() -> None:
    launch(0, 1, 1, 0)
    launch(1, 1, 1, 0)
    launch(0, 1, 1, 0)
    assert record() == [
        "load probe in 100",
        "launch 1 of 128, shared 0, stream 200, context 100 of 100, argument 1234, [6] = 1",
        "load probe in 101",
        "launch 1 of 128, shared 0, stream 201, context 101 of 101, argument 1234",  # 8.0 has no dependent launch
        "launch 1 of 128, shared 0, stream 200, context 100 of 100, argument 1234, [6] = 1",
    ]
    with pytest.raises(RuntimeError, match="CUDA device 2: CUDA_ERROR_X"):
        launch(2, 1, 1, 0)


def capture() -> None:
    launch(0, 1, 1, 0)
    driver.fake_set_capturing(1)
    launch(0, 1, 1, 0)
    with pytest.raises(RuntimeError, match=r"probe is used for the first time while a CUDA graph.*warm up"):
        launch(0, 1, 1, 4)
    driver.fake_set_capturing(0)
    launch(0, 1, 1, 4)


def fork() -> None:
    in_child(lambda: launch(0, 1, 1, 0))  # before the first use, a child may use CUDA itself
    launch(0, 1, 1, 0)
    for shared_bytes in (0, 4):  # a kernel that the parent had loaded, and another
        with pytest.raises(RuntimeError, match=r"forked from one that had used CUDA.*spawn"):
            in_child(lambda shared_bytes=shared_bytes: launch(0, 1, 1, shared_bytes))


def no_compiler() -> None:
    with pytest.raises(RuntimeError, match=r"found no NVRTC.*pip install nvidia-cuda-nvrtc"):
        launch(0, 1, 1, 0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
