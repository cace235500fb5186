"""How the op tests compare: layouts that an input can arrive in, bit equality, opcheck."""

import torch


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values as ``x`` (at least 2-D) in the memory layouts that callers produce."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 7), 99.0).to(x)
    wide[..., 3 : 3 + x.shape[-1]] = x
    sparse = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 99.0).to(x)
    sparse[..., ::2] = x
    return {
        "contiguous": x.contiguous(),
        "offset slice": wide[..., 3 : 3 + x.shape[-1]],
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "outer transposed": x.transpose(0, -2).contiguous().transpose(0, -2),
        "stride 2": sparse[..., ::2],
    }


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
    """Same shape, dtype and values; NaN equals NaN."""
    assert actual.shape == expected.shape, f"{message} shape {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{message} dtype {actual.dtype} != {expected.dtype}"
    actual, expected = actual.cpu(), expected.cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{message} {m}")


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def opcheck(op: torch._ops.OpOverload, args: tuple, kwargs: dict | None = None) -> None:
    """torch's own checks: schema, fake tensor against the real one (strides too), dynamic shapes under AOT dispatch."""
    float8 = [a for a in args if isinstance(a, torch.Tensor) and a.dtype in FLOAT8]
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not float8:
        checks.append("test_schema")  # compares the inputs before and after, which torch cannot for float8
    if any(isinstance(a, torch.Tensor) and a.device.type == "npu" for a in args):
        checks.remove("test_autograd_registration")  # knows a few devices only
    before = [a.float() for a in float8]
    result = torch.library.opcheck(op, args, kwargs or {}, test_utils=checks, raise_exception=True)
    assert set(result.values()) == {"SUCCESS"}, result
    for old, new in zip(before, float8, strict=True):
        assert_bit_equal(new.float(), old, "input")
