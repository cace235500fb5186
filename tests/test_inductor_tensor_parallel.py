"""A model whose matrices are shared out over two processes: swaps happen in what each of them compiles."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def test_two_processes(tmp_path):
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("tensor_parallel_worker.py"))]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for found in (json.loads(output.splitlines()[-1]) for output in outputs):
        assert found["error"] < 1e-5
        # Sums that cross processes are waited for in between: norms are found, and the residual in front of some.
        assert found["swaps"]["rotary_embedding"] == found["swaps"]["silu_and_mul"] == 2
        assert found["swaps"]["maskless_attention"] == 2
        assert found["swaps"].get("add_rms_norm", 0) + found["swaps"].get("rms_norm", 0) == 5
