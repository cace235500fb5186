"""``torch.compile(model, backend="deepinfer")``.

The backend is found by name through its entry point. Importing this package registers it as well, for an environment
that sees the package without its metadata.
"""

from torch._dynamo.backends.registry import list_backends, register_backend

from torch_deepinfer.inductor import experts
from torch_deepinfer.inductor.backend import deepinfer, inductor_configs
from torch_deepinfer.inductor.explain import explain
from torch_deepinfer.inductor.report import PatternReport, Report, report

if "deepinfer" not in list_backends(exclude_tags=()):
    register_backend(deepinfer)
experts.register()

__all__ = ["PatternReport", "Report", "deepinfer", "explain", "inductor_configs", "report"]
