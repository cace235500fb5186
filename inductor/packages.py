"""What packages that torch compiles ahead of time can hold of a call of a custom op."""

from typing import Any

import torch

from torch_deepinfer.inductor.matcher import Match

# Up to torch 2.12 an optional dtype in a package becomes another one when it is loaded.
_HOLDS_DTYPES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# Ops that round their results to the dtypes asked for at the very end: a cast behind them does the same.
_ROUND_LAST = (torch.ops.deepinfer.moe_router.default,)


def declines(match: Match) -> str | None:
    """Why the call cannot be in a package, if so."""
    if _HOLDS_DTYPES or match.op in _ROUND_LAST or not _dtypes(match.kwargs):
        return None
    return "packages of this version of torch hold no dtypes"


def arguments(op: torch._ops.OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named arguments as a package holds them: ints are spelled out, for packages mix up those that are not."""
    schema = [argument for argument in op._schema.arguments if argument.kwarg_only]
    ints = {a.name: a.default_value for a in schema if type(a.default_value) is int}
    dropped = () if _HOLDS_DTYPES else _dtypes(kwargs)
    return ints | {name: given for name, given in kwargs.items() if name not in dropped}


def _dtypes(kwargs: dict[str, Any]) -> list[str]:
    return [name for name, given in kwargs.items() if isinstance(given, torch.dtype)]
