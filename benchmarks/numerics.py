"""How far the logits of a bfloat16 model are from those of its float32 copy: uncompiled, compiled by stock
torch.compile, and with backend="deepinfer" by default and with every pattern on.

Tiny models of two layers with random weights, one prompt. A column holds the median over the tokens of the mean
absolute error, relative to the typical size of a logit, and behind it the share of tokens whose most likely next token
is that of float32.
"""

import argparse
import copy
import json
import sys
import warnings
from pathlib import Path

import harness
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_models import FAMILIES, prefill_inputs, tiny_model

import torch_deepinfer.inductor  # noqa: F401  (the backend, also where the package is not installed)

FORMS = {
    "eager": None,
    "stock": {},
    "ours": {"backend": "deepinfer"},
    "ours, all patterns": {"backend": "deepinfer", "options": {"deepinfer.patterns": "all"}},
}


@torch.no_grad()
def errors(family: str, device: str) -> dict[str, dict[str, float]]:
    model = tiny_model(family, torch.bfloat16).to(device)
    inputs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in prefill_inputs(4, 32).items()}
    exact = copy.deepcopy(model).float()(**inputs).logits
    result = {}
    for form, options in FORMS.items():
        torch._dynamo.reset()
        run = model if options is None else torch.compile(model, dynamic=False, **options)
        logits = run(**inputs).logits
        error = (logits - exact).abs().mean(-1).median() / exact.abs().mean()
        agreement = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
        result[form] = {"error": error.item(), "same token": agreement.item()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="save the table to benchmarks/results")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("family".ljust(16), *(form.ljust(20) for form in FORMS))
    rows = []
    for family in arguments.families:
        found = errors(family, arguments.device)
        cells = [f"{each['error']:.2e}  {each['same token']:.0%}" for each in found.values()]
        print(family.ljust(16), *(cell.ljust(20) for cell in cells), flush=True)
        rows.append({"family": family, **found})
    if arguments.json:
        path = harness.RESULTS / f"numerics-{arguments.device}.json"
        table = {"name": "numerics", "environment": harness.environment(arguments.device), "rows": rows}
        path.write_text(json.dumps(table, indent=1) + "\n")
        print("saved", path)


if __name__ == "__main__":
    main()
