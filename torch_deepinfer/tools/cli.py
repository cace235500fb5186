"""Entry point of the command line ``deepinfer``; each command has a module of its own beside this one."""

import argparse
from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepinfer", description="Tools of torch_deepinfer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("doctor", help="say what this machine has and what of it is used")

    cache = commands.add_parser("cache", help="the cache of compiled CUDA kernels")
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("dir", help="print the cache folders, in the order in which they are searched")
    actions.add_parser("list", help="list the compiled kernels, the last used first")
    actions.add_parser("clear", help="remove all compiled kernels from the folders that can be written")
    warmup = actions.add_parser("warmup", help="compile typical kernels of every family ahead of their first use")
    warmup.add_argument("--arch", action="append", help="such as sm_90a; default: those of the GPUs of this machine")
    warmup.add_argument("--jobs", type=int, default=None, help="kernels compiled at a time; default: one a CPU core")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from torch_deepinfer.tools import doctor

        return doctor.run()
    from torch_deepinfer.tools import cache

    if options.action == "warmup":
        return cache.warmup(options.arch, options.jobs)
    return {"dir": cache.print_roots, "list": cache.print_entries, "clear": cache.clear}[options.action]()


if __name__ == "__main__":
    raise SystemExit(main())
