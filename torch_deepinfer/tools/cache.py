"""``deepinfer cache``: the compiled CUDA kernels on disk. csrc/jit/cache.h describes the folder."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_deepinfer import jit


@dataclass
class Entry:
    """One compiled kernel."""

    folder: Path
    manifest: dict[str, str]
    size: int
    used: float  # seconds since the epoch


def entries() -> Iterator[Entry]:
    """All entries of all roots, in no order. Folders without a manifest are skipped."""
    for root in jit.cache_roots():
        for manifest in root.glob("v1/entries/*/manifest.txt"):
            try:
                lines = manifest.read_text().splitlines()
                size = sum(file.stat().st_size for file in manifest.parent.iterdir())
                used = manifest.stat().st_mtime
            except OSError:  # evicted meanwhile
                continue
            fields = dict(line.partition(": ")[::2] for line in lines)
            yield Entry(manifest.parent, fields, size, used)


def print_roots() -> int:
    for root in jit.cache_roots():
        print(root)
    return 0


def print_entries() -> int:
    found = sorted(entries(), key=lambda entry: -entry.used)
    print(f"{'kernel':24} {'arch':8} {'KiB':>6} {'compiled in':>12}  {'last used':16}  folder")
    for entry in found:
        kernel, arch = entry.manifest.get("kernel", "?"), entry.manifest.get("arch", "?")
        seconds = f"{float(entry.manifest.get('seconds', 'nan')):.2f} s"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{kernel:24} {arch:8} {entry.size / 1024:6.0f} {seconds:>12}  {used}  {entry.folder}")
    total, limit = sum(entry.size for entry in found), jit.cache_size_limit()
    print(f"{len(found)} kernels, {total / 2**20:.1f} MiB; each folder is kept below {limit / 2**20:.0f} MiB")
    return 0


def clear() -> int:
    """Removes the entries; kernels that running processes have loaded stay loaded."""
    removed = failed = 0
    for entry in list(entries()):
        shutil.rmtree(entry.folder, ignore_errors=True)
        gone = not entry.folder.exists()
        removed, failed = removed + gone, failed + (not gone)
    print(f"removed {removed} kernels" + (f", could not remove {failed}" if failed else ""))
    return 1 if failed else 0


def warmup(archs: list[str] | None, jobs: int | None) -> int:
    """Compiles the sample kernels of every family for the given architectures."""
    if not archs:
        archs = sorted({jit.device_arch(i) for i in range(torch.cuda.device_count())})
        if not archs:
            print("deepinfer cache warmup: there is no GPU here; name one with --arch, such as sm_90a", file=sys.stderr)
            return 2
    work = [(kernel, arch) for arch in archs for kernel in jit.samples()]
    start = time.perf_counter()
    failures = 0
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        counts = {"compiled": 0, "disk": 0, "memory": 0}
        for future in [pool.submit(jit.compile, kernel, arch) for kernel, arch in work]:
            try:
                counts[future.result().origin] += 1
            except (RuntimeError, ValueError) as error:
                failures += 1
                print(error, file=sys.stderr)
    print(
        f"{', '.join(archs)}: compiled {counts['compiled']} kernels in {time.perf_counter() - start:.1f} s, "
        f"{counts['disk'] + counts['memory']} were there, {failures} failed"
    )
    return 1 if failures else 0
