"""One of the processes of test_inductor_tensor_parallel.py: its share of a model, compiled and not."""

import json
import sys

import torch
import torch.distributed as dist
from graphs import swaps, traced
from tiny_models import prefill_inputs, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@torch.no_grad()
def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = tiny_model("llama", torch.float32)
    expected = whole(**prefill_inputs()).logits
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in whole.model.layers:
        for part in (layer.self_attn, layer.mlp):
            plan = {name: ColwiseParallel() for name in columns if hasattr(part, name)}
            parallelize_module(part, mesh, plan | {name: RowwiseParallel() for name in rows if hasattr(part, name)})
    run = traced(whole, {"deepinfer.patterns": "all"})
    logits = run(**prefill_inputs()).logits
    print(json.dumps({"swaps": swaps(run.report), "error": (logits - expected).abs().max().item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
