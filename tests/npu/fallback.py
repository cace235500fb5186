"""torch's own operators on the stand-in NPU, computed on the CPU: op tests make inputs and references with them.

Only the ops of this package are under test. Memory, views, copies and streams stay those of torch_npu.
"""

import warnings

import torch
from torch.utils._pytree import tree_map

# What moves or makes tensors; views are found by their schema.
NATIVE = {
    "empty", "empty_strided", "new_empty", "new_empty_strided", "copy_", "_copy_from", "_copy_from_and_resize", "set_",
    "resize_", "record_stream", "is_pinned", "pin_memory", "_pin_memory", "_local_scalar_dense", "_to_copy", "zero_",
    "detach", "detach_", "clone", "contiguous", "_has_same_storage_numel", "_lazy_clone", "to", "item", "data",
}  # fmt: skip


def _is_view(schema: torch._C.FunctionSchema) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in (*schema.arguments, *schema.returns))


def _to_cpu(value):
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return value.cpu()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_cpu(op: torch._ops.OpOverload):
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in op._schema.arguments]

    def run(*args, **kwargs):
        devices = {a.device for a in _tensors((args, kwargs)) if a.device.type == "npu"}
        wanted = kwargs.get("device")
        target = torch.device(wanted) if wanted is not None else next(iter(devices), torch.device("npu"))
        cpu_args, cpu_kwargs = tree_map(_to_cpu, (args, kwargs))
        if isinstance(wanted, str | torch.device):
            cpu_kwargs["device"] = torch.device("cpu")
        result = op(*cpu_args, **cpu_kwargs)
        back = {}
        for i in written:
            given = args[i] if i < len(args) else kwargs[names[i]]
            computed = cpu_args[i] if i < len(args) else cpu_kwargs[names[i]]
            if isinstance(given, torch.Tensor):
                if given.shape != computed.shape:
                    given.resize_(computed.shape)
                given.copy_(computed)
                back[id(computed)] = given

        def to_npu(value):
            if not isinstance(value, torch.Tensor):
                return value
            return back[id(value)] if id(value) in back else value.to(target)

        return tree_map(to_npu, result)

    return run


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def install() -> torch.library.Library:
    """The registrations hold as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            if not name.startswith("aten::"):
                continue
            base, _, overload = name[len("aten::") :].partition(".")
            try:
                op = getattr(getattr(torch.ops.aten, base), overload or "default")
            except AttributeError:
                continue  # torch_npu's own
            if base in NATIVE or _is_view(op._schema):
                continue
            library.impl(name[len("aten::") :], _on_cpu(op), "PrivateUse1", allow_override=True)
    return library
