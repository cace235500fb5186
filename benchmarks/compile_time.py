"""How long the first call of a compiled model takes, with empty caches: tracing, the passes, code generation.

A row starts two processes in turns, each with a cache folder of its own that is deleted afterwards.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Bench, Timing

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")

SCRIPT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import torch_deepinfer.inductor
from tiny_models import prefill_inputs, tiny_model
device, options = sys.argv[3], json.loads(sys.argv[4])
model = tiny_model(sys.argv[2], torch.bfloat16).to(device)
inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in prefill_inputs().items()}
with torch.no_grad():
    torch.compile(lambda x: x + 1)(torch.ones(1, device=device))  # starts what compiles
    model(**inputs)
    start = time.perf_counter()
    torch.compile(model, dynamic=False, **options)(**inputs)
    if device == "cuda":
        torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(family: str, device: str, options: dict[str, str]) -> float:
    """Seconds, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "DEEPINFER_CACHE_DIR": folder}
        tests = Path(__file__).parents[1] / "tests"
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, tests, family, device, json.dumps(options)]
        output = subprocess.run(list(map(str, command)), env=environ, check=True, capture_output=True, text=True)
    return float(output.stdout.split()[-1])


def main() -> None:
    bench = Bench("compile_time", __doc__)
    bench.parser.set_defaults(rounds=5)
    columns = {"ours": {"backend": "deepinfer"}, "stock": {}}
    for family in FAMILIES:
        if not bench.wanted({"family": family}):
            continue
        samples: dict[str, list[float]] = {name: [] for name in columns}
        for _ in range(bench.args.rounds):
            for name, options in columns.items():
                samples[name].append(first_call(family, bench.args.device, options))
        bench.record({"family": family}, {name: Timing(seconds) for name, seconds in samples.items()})
    bench.finish()


if __name__ == "__main__":
    main()
