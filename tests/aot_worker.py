"""Loads a package compiled ahead of time, in a process of its own: package, input, where the result goes."""

import sys

import torch

import torch_deepinfer  # noqa: F401  (registers the ops that the package calls)

package, given, result = sys.argv[1:]
with torch.no_grad():
    torch.save(torch._inductor.aoti_load_package(package)(torch.load(given)), result)
