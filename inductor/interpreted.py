"""For devices that Inductor generates no code for, such as an NPU: the graph after the swaps, op by op."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
from torch.fx import GraphModule

from torch_deepinfer.inductor.passes import CountPass


def is_needed(example_inputs: Sequence[Any]) -> bool:
    """Whether an input is on such a device."""
    init_backend_registration()
    types = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    return any(get_scheduling_for_device(device_type) is None for device_type in types - {"meta"})


def without_code(count: CountPass) -> Callable[..., Any]:
    """Takes the place of ``compile_fx_inner``. ``count`` runs where Inductor would have run it."""

    def interpret(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        count(gm.graph)
        return make_boxed_func(gm.forward)

    return interpret
