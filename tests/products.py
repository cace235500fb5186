"""How the tests of matrix products judge a result."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the exact result."""
    return float((actual.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().clamp_min(1e-300))


def rounding(dtype: torch.dtype) -> float:
    """What one rounding to the dtype may cost, in the norm."""
    return {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[dtype]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Element by element, for inputs of any shape: sums of values about 1, which may cancel."""
    tolerance = 4 * rounding(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def offsets_of(sizes: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).int()
