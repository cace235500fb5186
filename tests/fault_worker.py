"""Breaks the kernel cache at every step of a write in turn. Run by test_jit.py under native/faults.c.

Each try is a forked child that compiles one kernel into an empty cache while the fault strikes. Then a healthy child
must get the right kernel, and a third one must find it on disk.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path

from forking import Child, in_child

from torch_deepinfer import jit

KERNEL = jit.Kernel("copy_rows", "// a kernel\n" * 500)
faults = ctypes.CDLL(None)


def compile_with_fault(step: int, error: int) -> tuple[str, str, int]:
    faults.faults_arm(step, error)
    result = jit.compile(KERNEL, "sm_90a")
    return result.origin, result.path, faults.faults_steps()


def main(root: Path, error: int) -> None:
    _, _, steps = in_child(lambda: compile_with_fault(10**6, error))
    assert steps > 10, steps
    for step in range(steps):
        shutil.rmtree(root)
        root.mkdir()
        child = Child(lambda step=step: compile_with_fault(step, error))
        if error == 0:
            assert child.exit_code() == 9, step
        else:
            origin, _, _ = child.result()
            assert origin == "compiled", (step, origin)
        # The write may have been complete when the fault struck.
        again = in_child(lambda: jit.compile(KERNEL, "sm_90a"))
        assert again.origin in ("compiled", "disk"), (step, again)
        assert (Path(again.path) / "kernel.cubin").read_text() == KERNEL.source, step
        assert in_child(lambda: jit.compile(KERNEL, "sm_90a")).origin == "disk", step
    print(f"{steps} steps")


if __name__ == "__main__":
    main(Path(os.environ["FAULT_ROOT"]), int(sys.argv[1]))
