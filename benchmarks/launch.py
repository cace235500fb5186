"""Host time of a call: what an op of the package costs before the device starts, against torch.mul on the same tensor.

Also the time of a kernel's first call in a process: compiled, and from the cache on disk.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from harness import compare, ratio

from torch_deepinfer import ops

FIRST_CALL = """
import time, torch, torch_deepinfer
from torch_deepinfer import ops
x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
(x * x).sum().item()
start = time.perf_counter()
ops.rms_norm(x, x[0], 1e-6)
print(1e3 * (time.perf_counter() - start))
"""


def host_time(device: str) -> None:
    x = torch.randn(8, 64, device=device)
    weight = torch.randn(64, device=device)
    norm = torch.ops.deepinfer.rms_norm.default
    calls = {
        "torch.mul": partial(torch.mul, x, x),
        "aten.mul.Tensor": partial(torch.ops.aten.mul.Tensor, x, x),
        "torch.nn.functional.rms_norm": partial(torch.nn.functional.rms_norm, x, (64,), weight, 1e-6),
        "deepinfer.rms_norm.default": partial(norm, x, weight, 1e-6, "cast_mul"),
        "torch_deepinfer.ops.rms_norm": partial(ops.rms_norm, x, weight, 1e-6),
        "torch_deepinfer.ops.add_rms_norm": partial(ops.add_rms_norm, x, x, weight, 1e-6),
    }

    def burst(call) -> None:
        for _ in range(200):  # short of the depth of the launch queue
            call()

    def synchronized(call) -> None:
        burst(call)
        if device == "cuda":
            torch.cuda.synchronize()

    # The wait for the device is common to all and small beside the calls; "cpu": clocks, not device events.
    timings = compare({name: partial(synchronized, call) for name, call in calls.items()}, rounds=21, device="cpu")
    base = timings["torch.mul"]
    print(f"{'':36} {'us a call':>10} {'over mul':>9} {'ratio':>6}")
    for name, timing in timings.items():
        microseconds = timing.median / 200 * 1e6
        over = microseconds - base.median / 200 * 1e6
        print(f"{name:36} {microseconds:10.2f} {over:+9.2f} {ratio(timing, base):6.2f}")


def first_calls() -> None:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"DEEPINFER_CACHE_DIR": cache}
        for what in ("compiled", "from disk", "from disk"):
            out = subprocess.run(
                [sys.executable, "-c", FIRST_CALL], env=environment, check=True, stdout=subprocess.PIPE
            )
            print(f"first call, {what}: {float(out.stdout):.1f} ms")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    host_time(device)
    if device == "cuda":
        first_calls()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
