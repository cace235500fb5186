"""``torch.compile(model, backend="deepinfer")``: Inductor, with our ops swapped in before it generates code."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.source import DictGetItemSource, GetItemSource, LocalSource
from torch._guards import Source
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

import torch_deepinfer  # noqa: F401  (compiled graphs call its ops)
from torch_deepinfer.inductor import interpreted
from torch_deepinfer.inductor import settings as settings_of
from torch_deepinfer.inductor.passes import CountPass, SwapPass, compose
from torch_deepinfer.inductor.rewrite import Rewrites

_SWAP, _COUNT = "joint_custom_pre_pass", "post_grad_custom_post_pass"


def deepinfer(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """The backend. ``torch.compile`` calls it once for every graph.

    Args:
        mode: as for the default backend of ``torch.compile``.
        options: options of Inductor, and our own, see :func:`torch_deepinfer.inductor.settings.parse`.
        kwargs: passed on to ``compile_fx``.

    Raises:
        ValueError: an unknown option.
        RuntimeError: an unknown mode.
    """
    done = Rewrites()
    if interpreted.is_needed(example_inputs):
        settings, _ = settings_of.parse(options)
        kwargs.setdefault("inner_compile", interpreted.without_code(CountPass(settings, done)))
    return compile_graph(gm, example_inputs, done, mode=mode, options=options, **kwargs)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    done: Rewrites,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """As :func:`deepinfer`; leaves in ``done`` what was swapped, until the graph is lowered and it is counted."""
    _keep_floats_constant(gm)
    return compile_fx(gm, example_inputs, config_patches=_patches(done, mode, options), **kwargs)


def inductor_configs(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """For what takes options of Inductor and no backend: a model that is compiled ahead of time.

    ::

        torch._inductor.aoti_compile_and_package(exported, inductor_configs=inductor_configs())

    The process that loads the package has to ``import torch_deepinfer`` first. Export under ``torch.no_grad()``.

    Args:
        options: as for :func:`deepinfer`.
    """
    return _patches(Rewrites(), None, options)


def _patches(done: Rewrites, mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    settings, inductor_options = settings_of.parse(options)
    patches = {**(list_mode_options(mode) if mode else {}), **_checked(inductor_options)}
    for option, ours in ((_SWAP, SwapPass(settings, done)), (_COUNT, CountPass(settings, done))):
        patches[option] = compose(ours, patches.get(option, getattr(inductor_config, option)))
    return patches


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    known = inductor_config.get_config_copy()
    checked = {key.replace("-", "_"): value for key, value in options.items()}
    for key in checked:
        if key not in known:
            ours = ", ".join(settings_of.PREFIX + name for name in settings_of.OPTIONS)
            raise ValueError(f"unknown option {key!r}: neither an option of Inductor nor one of ours, {ours}")
    return checked


def _keep_floats_constant(gm: GraphModule) -> None:
    """With ``dynamic=True`` Dynamo makes every float of a module an input of the graph, and no eps is known any more.

    A guard on such a float makes Dynamo trace again with its value; sizes stay dynamic. The same goes for floats that
    are globals, closures or defaults. Only arguments of the compiled call, a temperature for instance, stay inputs.
    """
    for node in gm.graph.nodes:
        example = node.meta.get("example_value")
        if not isinstance(example, torch.SymFloat):
            continue
        # The float arrives as a 0-d tensor, out of which the graph takes the number.
        arrives_as = node.args[0] if node.op == "call_method" and node.target == "item" else node
        source = getattr(arrives_as, "_dynamo_source", None)
        if source is not None and not _is_argument(source):
            example.node.guard_float(__file__, 0)


def _is_argument(source: Source) -> bool:
    while isinstance(source, (GetItemSource, DictGetItemSource)):
        source = source.base
    return isinstance(source, LocalSource) and source.is_input


def _reset() -> None:
    """What ``torch._dynamo.reset()`` has to forget for this backend: recorded CUDA graphs."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


deepinfer.reset = _reset  # type: ignore[attr-defined]
