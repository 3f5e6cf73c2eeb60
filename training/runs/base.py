"""The base model that adapters are trained on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel
from training.errors import MemoryExceeded, OptionInvalid

Dtype = Literal["float32", "bfloat16", "float16"]

_UNLOADABLE = (OSError, ValueError, KeyError, ImportError)  # what transformers raises for directories
_SHOWN_WEIGHTS = 3
_SMALL = 20_000_000  # parameters


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A model of transformers with its tokenizer."""

    model: Any
    tokenizer: Any
    sizes: BaseModel
    ends: frozenset[int]  # end-of-sequence ids of config.json and generation_config.json


def load_base(directory: Path, dtype: Dtype, device: str) -> LoadedBase:
    """Load from disk, never from a hub.

    Raises OptionInvalid, also for weights that are damaged or not all there, and MemoryExceeded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_device(device)
    try:
        sizes = BaseModel.read(directory)
        if not sizes.family.is_trained:
            raise OptionInvalid(
                f"{directory}: {sizes.architecture} is served, but not trained here; train it with peft "
                "and import the adapter"
            )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_weights` names them
        )
    except BaseModelInvalid as error:
        raise OptionInvalid(str(error)) from error
    except SafetensorError as error:
        raise OptionInvalid(
            f"{directory}: a weight file is damaged or cut off ({error}); copy or download the model again"
        ) from error
    except _UNLOADABLE as error:
        raise _unloadable(directory, error) from error
    _check_weights(directory, loaded)
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise MemoryExceeded(
            f"{directory} does not fit into the memory of {device!r} as {dtype} ({str(error)[:200]}); stop what else "
            "uses it, or take a larger device"
        ) from error
    return LoadedBase(model, tokenizer, sizes, end_ids(model.config, model.generation_config))


def _check_weights(directory: Path, loaded: Mapping[str, Any]) -> None:
    """Raises OptionInvalid unless all weights come from files: transformers draws the others at random and warns."""
    wrong = [f"{name} is missing" for name in sorted(loaded["missing_keys"])]
    wrong += [
        f"{name} is {list(found)} and config.json wants {list(wanted)}"
        for name, found, wanted in sorted(loaded["mismatched_keys"])
    ]
    if wrong:
        shown = wrong[:_SHOWN_WEIGHTS]
        if len(wrong) > len(shown):
            shown.append(f"and {len(wrong) - len(shown)} more")
        raise OptionInvalid(
            f"{directory}: the weight files are not those of config.json: {'; '.join(shown)}. Copy or download the "
            "model again"
        )


def load_tokenizer(directory: Path) -> tuple[Any, frozenset[int]]:
    """A model's tokenizer and its end-of-sequence ids, without its weights. Raises OptionInvalid."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        configs = [AutoConfig.from_pretrained(directory, local_files_only=True)]
        if (directory / "generation_config.json").exists():
            configs.append(GenerationConfig.from_pretrained(directory, local_files_only=True))
    except _UNLOADABLE as error:
        raise _unloadable(directory, error) from error
    return tokenizer, end_ids(*configs)


def _unloadable(directory: Path, error: Exception) -> OptionInvalid:
    first = str(error).strip().splitlines() or [type(error).__name__]
    return OptionInvalid(f"{directory} cannot be loaded by transformers: {first[0][:300]}")


def end_ids(*configs: Any) -> frozenset[int]:
    """The end-of-sequence ids of config.json and generation_config.json, as transformers has read them."""
    found: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_threads(base: LoadedBase) -> None:
    """One thread for a small model: threads that wait for one another take longer than the work. For the process."""
    is_small = sum(each.numel() for each in base.model.parameters()) < _SMALL
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def check_device(device: str) -> None:
    """Raises OptionInvalid for a device that this machine lacks."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0][:200]
        raise OptionInvalid(f"the device is {device!r}, which cannot be used here ({first}); 'cpu' can") from error
