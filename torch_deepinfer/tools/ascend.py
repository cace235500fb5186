"""What ``deepinfer doctor`` says about Ascend NPUs.

It reads files and metadata and never imports torch_npu, which may be what is broken.
"""

import importlib.metadata
import os
import re
from ctypes.util import find_library
from pathlib import Path

import torch

from torch_deepinfer import jit

# What torch_npu is linked against, of CANN.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")

FOLDERS = [f"{root}/{name}" for root in ("/usr/local/Ascend", "~/Ascend") for name in ("cann", "ascend-toolkit/latest")]

SETTINGS = ("ASCEND_RT_VISIBLE_DEVICES", "TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def sections() -> dict[str, list[str]]:
    """Title and lines, in the order of a report."""
    parts = {"torch_npu": _torch_npu, "CANN": _cann, "NPU compiler": _compiler, "NPU": _npus}
    return {title: _safely(part) for title, part in parts.items()}


def _safely(part) -> list[str]:
    try:
        return part()
    except Exception as error:  # a report of what is broken must not break on it
        return [f"could not be found out: {error}"]


def _release(version: str) -> str:
    return ".".join(re.split(r"[.+]", version)[:3])


def _torch_npu() -> list[str]:
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return ["not installed: torch sees no NPU"]
    lines = [version]
    if _release(version) != _release(torch.__version__):
        lines.append(f"does not fit torch {torch.__version__}: install the torch_npu of that version")
    if torch.version.cuda is not None:
        lines.append("does not fit a torch with CUDA, whose process ends: keep them in environments of their own")
    missing = [f"lib{name}.so" for name in LIBRARIES if not _is_found(name)]
    if missing:
        lines.append(f"misses {', '.join(missing)}: source set_env.sh of CANN")
        lines.append("until then `import torch` fails unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set")
    lines += [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return lines


def _is_found(library: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(folder and (Path(folder) / f"lib{library}.so").exists() for folder in folders) or bool(
        find_library(library)
    )


def _toolkit() -> Path | None:
    named = [os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    candidates = [Path(folder).expanduser() for folder in (*filter(None, named), *FOLDERS)]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _version(toolkit: Path) -> str:
    for pattern in ("version.cfg", "*/ascend_toolkit_install.info", "*/version.info", "version.info"):
        for file in sorted(toolkit.glob(pattern)):
            found = re.search(r"(?im)^\s*(?:version|\w*running_version)\s*=\s*\[?([^\s\],]+)", file.read_text())
            if found:
                return f"version {found[1]}"
    return "of a version that no file tells"


def _cann() -> list[str]:
    home = os.environ.get("ASCEND_HOME_PATH")
    if home and not Path(home).is_dir():
        return [f"ASCEND_HOME_PATH is {home}, which is no folder"]
    toolkit = _toolkit()
    if toolkit is None:
        return ["none: neither ASCEND_HOME_PATH nor a standard folder leads to a toolkit"]
    lines = [f"{_version(toolkit)}, {toolkit}"]
    if not home:
        lines.append(f"not in use: source {toolkit}/set_env.sh")
    absent = [name for name in ("runtime", "compiler", "opp") if not (toolkit / name).exists()]
    if absent:
        lines.append(f"incomplete: no {', '.join(absent)} in it")
    return lines


def _compiler() -> list[str]:
    try:
        found = jit.ascend_compiler()
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines()
        told = _toolkit() is not None or "DEEPINFER_BISHENG" in os.environ
        return lines if told else ["none: it comes with CANN"]
    return [f"{found.identity}, {found.path}"]


def _npus() -> list[str]:
    boards = sorted(Path("/dev").glob("davinci[0-9]*"))
    if not hasattr(torch, "npu"):
        if not boards:
            return ["none: no /dev/davinci0 here"]
        return [f"{len(boards)} in /dev, but torch knows of none: torch_npu is not loaded"]
    if not torch.npu.is_available():
        return ["none: torch_npu sees no NPU" + (f", although /dev has {len(boards)}" if boards else "")]
    lines = []
    for index in range(torch.npu.device_count()):
        try:
            use = f"kernels for {jit.npu_arch(index)}"
        except RuntimeError as error:
            use = f"no kernels: {error}"
        lines.append(f"{index}: {torch.npu.get_device_name(index)}, {use}")
    return lines
