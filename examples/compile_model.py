"""Compiles a real model with backend="deepinfer", next to the uncompiled model and to stock torch.compile.

The model is SmolLM2-135M-Instruct, or your own. It runs in two forms: as it is, and as a mixture of experts that
computes the same function (see upcycle.py). Shown for each form: the speed of the prefill and of greedy decoding,
whether the text, written in float32, is that of the uncompiled model, and which patterns the backend replaced.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar is enough; read when tqdm is imported

try:
    import transformers
    import typer
    from comparison import BASELINE, EAGER, OURS, Comparison, Size, Text, Timing, compare
    from loading import DTYPES, ModelError, load
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from upcycle import upcycle
except ModuleNotFoundError as error:
    sys.exit(f"compile_model: {error}; install what the demonstration needs: pip install 'torch-deepinfer[demo]'")

OUTPUT = Path(__file__).parent / "output"
FORMS = {"dense": "the model as it is", "moe": "the model as a mixture of 16 experts, 4 for each token"}
SECONDS_BETWEEN_LINES = 5  # of progress, where there is no terminal
FULL = Size()
QUICK = Size(prompt_tokens=128, new_tokens=16, timed_tokens=8, rounds=5, messages=1)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    model: Annotated[str | None, typer.Option(help="Your own model: folder, .gguf file or Hub name.")] = None,
    forms: Annotated[str, typer.Option(help="Which forms to run, separated by commas.")] = ",".join(FORMS),
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    quick: Annotated[bool, typer.Option("--quick", help="A shorter prompt, fewer tokens, one text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    _silence_libraries()
    try:
        console, results = Console(), []
        for result in run(model, _parse_forms(forms), dtype, QUICK if quick else FULL):
            results.append(result)
            if not as_json:
                show(result, console)
        chart = save_chart(results, OUTPUT / "compile_model.png")
    except (ModelError, OSError) as error:
        typer.echo(f"compile_model: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"forms": [each.as_dict() for each in results], "chart": str(chart)}, indent=1))
    else:
        console.print(f"chart: {chart}")


def run(source: str | None, forms: list[str], dtype: str, size: Size) -> Iterator[Comparison]:
    """Loads the model and compares each form. Raises ModelError with one line for the user."""
    with _advancing("loading the model", 1) as advance:
        advance("")
        dense, tokenizer = load(source, dtype)
    for form in forms:
        model = dense if form == "dense" else _upcycled(dense)
        with _advancing(form, size.steps) as advance:
            result = compare(form, model, tokenizer, size, advance)
        yield result


@contextmanager
def _advancing(what: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Takes descriptions of what comes next: for a bar on a terminal, for a line now and then elsewhere."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    screen = Console(stderr=True)
    settings = {"console": screen, "transient": True, "disable": not screen.is_terminal}
    start = printed = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), **settings) as progress:
        task = progress.add_task(what, total=steps)

        def advance(description: str) -> None:
            nonlocal printed
            text = f"{what}: {description}" if description else what
            progress.update(task, advance=1, description=text)
            now = time.monotonic()
            if not screen.is_terminal and now - printed > SECONDS_BETWEEN_LINES:
                printed = now
                screen.print(f"{now - start:4.0f} s  {text}", markup=False, highlight=False)

        yield advance


def show(result: Comparison, console: Console) -> None:
    """Prints the tables of one form."""
    table = Table(title=FORMS[result.form], title_justify="left", title_style="bold")
    for name in ("", "", "seconds", "tokens/s", f"x {BASELINE}", "first call, s"):
        table.add_column(name, justify="right" if name else "left")
    for timing in result.timings:
        table.add_row(
            timing.phase,
            timing.variant,
            f"{timing.seconds:.4f}",
            f"{timing.tokens_per_second:.1f}",
            f"{timing.ratio:.2f}",
            f"{timing.first_call:.1f}",
            end_section=timing.variant == OURS,
        )
    console.print(table)
    for text in result.texts:
        console.print(f"> {text.message}", style="bold", markup=False, highlight=False)
        console.print(text.text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"[{text.tokens} tokens; {OURS} {_verdict(text)}]", style="italic", markup=False, highlight=False)
    console.print()
    console.print(str(result.report), markup=False, highlight=False, soft_wrap=True)
    console.print()


def _verdict(text: Text) -> str:
    return f"identical to {EAGER}" if text.agree == text.tokens else f"differs from {EAGER} after {text.agree}"


def save_chart(results: list[Comparison], path: Path) -> Path:
    """A bar chart of tokens a second, one panel for each form and phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Timing]] = {}
    for result in results:
        for timing in result.timings:
            panels.setdefault(f"{result.form}, {timing.phase}", []).append(timing)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3 * len(panels), 3.5), layout="constrained", squeeze=False)
    for axis, (title, bars) in zip(axes[0], panels.items(), strict=True):
        heights = [bar.tokens_per_second for bar in bars]
        drawn = axis.bar([bar.variant for bar in bars], heights, color=("C7", "C0", "C1"))
        axis.bar_label(drawn, [f"{bar.ratio:.2f}x" for bar in bars])
        axis.set_title(title)
        axis.margins(y=0.15)
    axes[0][0].set_ylabel("tokens/s")
    figure.suptitle("tokens a second, and speed relative to stock torch.compile")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _parse_forms(text: str) -> list[str]:
    forms = [form.strip() for form in text.split(",")]
    for form in forms:
        if form not in FORMS:
            raise ModelError(f"unknown form {form!r}: choose from {', '.join(FORMS)}")
    return forms


def _upcycled(model: Any) -> Any:
    try:
        return upcycle(model)
    except ValueError as error:
        raise ModelError(f"{error}; run it as it is with --forms dense") from None


def _silence_libraries() -> None:
    """Their warnings and bars would tear our progress bar, and tell the user nothing to act on."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


if __name__ == "__main__":
    app()
