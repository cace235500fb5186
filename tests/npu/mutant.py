"""A fault that is seeded into a kernel, and how it shows."""

from collections.abc import Callable
from typing import NamedTuple

WRONG_VALUES = "not (close|equal)"  # no rule is broken, the numbers are wrong


class Mutant(NamedTuple):
    """``old`` is replaced by ``new`` throughout csrc/npu/``file``; ``message`` is what the model then says."""

    file: str
    old: str
    new: str
    message: str
    call: Callable[[], None]
