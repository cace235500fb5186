"""Argument checks of the meta kernels: the same rules and words as the native ones."""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(condition: bool, message: str) -> None:
    """Raises ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_float_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless ``dtype`` is one of the floating-point dtypes that the ops take."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{op}: {argument} must be float32, bfloat16 or float16, got {name_of(dtype)}")


def check_written(op: str, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError unless a tensor that is written has this shape and is not expanded."""
    check(
        list(tensor.shape) == list(shape),
        f"{op}: {argument} must have shape {list(shape)}, got {shape_of(tensor)}",
    )
    expanded = any(isinstance(s, int) and s == 0 and n != 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    check(not expanded, f"{op}: {argument} is written and must not be expanded or have elements that share memory")


def name_of(dtype: torch.dtype) -> str:
    """The dtype as the native checks print it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> str:
    """The shape as the native checks print it."""
    return str(list(tensor.shape))
