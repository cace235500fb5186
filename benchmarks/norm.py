"""rms_norm and add_rms_norm against eager torch and stock torch.compile."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops
from torch_deepinfer.reference import norm as reference


def main() -> None:
    bench = Bench("norm", __doc__)
    device = bench.args.device
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, hidden_size in [(1, 576), (1, 4096), (8, 4096), (64, 2048), (512, 576), (512, 4096), (4096, 7168)]:
            x, residual = (torch.randn(tokens, hidden_size, device=device).to(dtype) for _ in range(2))
            weight = torch.randn(hidden_size, device=device).to(dtype)
            eager = {"rms_norm": reference.rms_norm, "add_rms_norm": reference.add_rms_norm}
            for name, arguments, traffic in [
                ("rms_norm", (x, weight, 1e-6), 2 * x.nbytes),
                ("add_rms_norm", (x, residual, weight, 1e-6), 4 * x.nbytes),
            ]:
                bench.row(
                    {"op": name, "shape": f"{tokens}x{hidden_size} {str(dtype).removeprefix('torch.')}"},
                    {
                        "ours": partial(getattr(ops, name), *arguments),
                        "eager": partial(eager[name], *arguments),
                        "stock": partial(torch.compile(eager[name], dynamic=False), *arguments),
                    },
                    traffic,
                )
    bench.finish()


if __name__ == "__main__":
    main()
