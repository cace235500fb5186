"""What a user can choose: ``options={"deepinfer...": ...}`` of ``torch.compile`` and the environment."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_deepinfer import jit
from torch_deepinfer.inductor import gates
from torch_deepinfer.inductor.patterns import FAMILIES, NAMES, PATTERNS

PREFIX = "deepinfer."
OPTIONS = ("patterns", "disable", "strict", "expect")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same choices print the same text in every process: it is part of the cache key.

    ``patterns`` is None for "what the gates allow"; otherwise exactly these are swapped, whatever the gates say.
    """

    patterns: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    strict: bool = False
    expect: tuple[tuple[str, int], ...] = ()

    def declines(self, pattern: str, device_type: str, rows: Any) -> str | None:
        """Why ``pattern`` is not to be swapped on this device for this many (perhaps symbolic) rows; None if it is."""
        if pattern in self.disable:
            return "disabled by the user"
        if device_type == "cuda" and not jit.available():
            return "no compiler for CUDA kernels here: see `deepinfer doctor`"
        if self.patterns is not None:
            return None if pattern in self.patterns else "not among the chosen patterns"
        gate = gates.gate(pattern, device_type)
        if not gate.on:
            return f"off on {device_type}: {gate.reason}"
        if gate.max_rows is not None and statically_known_true(rows > gate.max_rows):
            return f"off on {device_type} for more than {gate.max_rows} rows: {gate.reason}"
        if gate.min_rows is not None and not statically_known_true(rows >= gate.min_rows):
            return f"off on {device_type} for fewer than {gate.min_rows} rows: {gate.reason}"
        return None


def parse(
    options: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ
) -> tuple[Settings, dict[str, Any]]:
    """Splits the options of ``torch.compile`` into ours and Inductor's.

    - ``deepinfer.patterns``: a list of pattern or family names, or ``"all"``; only these are swapped, and all of them,
      whatever the gates say
    - ``deepinfer.disable``: names to leave alone; the environment variable ``DEEPINFER_DISABLE`` adds to it (names
      separated by commas, or ``all``)
    - ``deepinfer.strict``: raise if something looked like a pattern and was not
    - ``deepinfer.expect``: ``{pattern: count}``; raise if a graph gets another number of swaps

    Raises:
        ValueError: an unknown key, pattern name or type.
    """
    ours = {key: value for key, value in (options or {}).items() if key.startswith(PREFIX)}
    theirs = {key: value for key, value in (options or {}).items() if key not in ours}
    for key in ours:
        if key.removeprefix(PREFIX) not in OPTIONS:
            raise ValueError(f"unknown option {key!r}; deepinfer has {', '.join(PREFIX + name for name in OPTIONS)}")
    disable = _names("deepinfer.disable", ours.get("deepinfer.disable", ()))
    disable += _names("DEEPINFER_DISABLE", environ.get("DEEPINFER_DISABLE", ""))
    patterns = ours.get("deepinfer.patterns")
    strict, expect = ours.get("deepinfer.strict", False), ours.get("deepinfer.expect", {})
    if not isinstance(strict, bool):
        raise ValueError(f"deepinfer.strict must be a bool, got {strict!r}")
    if not isinstance(expect, Mapping) or not set(expect) <= set(NAMES):
        raise ValueError(f"deepinfer.expect must map some of {', '.join(NAMES)} to counts, got {expect!r}")
    settings = Settings(
        None if patterns is None else _names("deepinfer.patterns", patterns),
        tuple(sorted(set(disable))),
        strict,
        tuple(sorted((name, int(count)) for name, count in expect.items())),
    )
    return settings, theirs


def _names(option: str, given: Any) -> tuple[str, ...]:
    """Pattern names out of a list or a comma-separated string of pattern names, family names and ``all``."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    if not isinstance(given, (list, tuple, set, frozenset)):
        raise ValueError(f"{option} must be a list of names or 'all', got {given!r}")
    names: set[str] = set()
    for name in given:
        if name == "all":
            names.update(NAMES)
        elif name in NAMES:
            names.add(name)
        elif name in FAMILIES:
            names.update(pattern.name for pattern in PATTERNS if pattern.family == name)
        else:
            known = ", ".join((*NAMES, *FAMILIES, "all"))
            raise ValueError(f"{option}: unknown pattern {name!r}; there are {known}")
    return tuple(sorted(names))
