"""Convert pickled weights to safetensors, once and explicitly. Needs torch.

torch's restricted unpickler (`weights_only=True`) makes tensors and plain containers only, and runs no code that the
file chooses. Nothing else in Prelude reads a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.errors import AdapterMalformed, AdapterTooLarge, AdapterUnsupported
from adapters.files.durable import fsync_file, new_folder
from adapters.formats import pyreft
from adapters.formats.folder import AdapterFolder, Limits
from adapters.formats.peft import config as peft_config
from adapters.formats.peft import lora as peft_lora

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def convert_pickle(directory: Path, out: Path, limits: Limits | None = None) -> Path:
    """Write the adapter in `directory` to the new directory `out`, with safetensors in place of pickles.

    Reads PEFT's adapter_model.bin and pyreft's intkey_*.bin. The result is not checked further: read it with
    `read_adapter`. Raises AdapterError for what it cannot convert, FileExistsError if
    `out` exists.
    """
    folder = AdapterFolder(Path(directory), limits or Limits())
    with new_folder(out) as new:
        _convert(folder, new)
    return out


def _convert(folder: AdapterFolder, out: Path) -> None:
    peft_weights = f"{peft_lora.WEIGHTS_STEM}.bin"
    if peft_config.CONFIG_NAME in folder.names and peft_weights in folder.names:
        _convert_file(folder, peft_weights, out)
        _copy(folder, peft_config.CONFIG_NAME, out)
        if "added_tokens.json" in folder.names:
            _copy(folder, "added_tokens.json", out)
        return
    if pyreft.is_pyreft(folder):
        for name in sorted(folder.names):
            if name.startswith(pyreft.FILE_PREFIX) and name.endswith(".bin"):
                _convert_file(folder, name, out)
        _copy(folder, pyreft.CONFIG_NAME, out)
        return
    raise AdapterUnsupported(
        f"{folder.directory} is neither a pyreft directory nor a PEFT one with {peft_config.CONFIG_NAME} and "
        f"{peft_weights}; those can be converted"
    )


def _load(folder: AdapterFolder, name: str) -> Mapping[Any, Any]:
    with folder.open(name) as (descriptor, num_bytes):
        folder.account(name, num_bytes)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                value = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch can raise anything for a damaged or hostile file
            raise AdapterMalformed(
                f"{name} cannot be read as a pickle of tensors alone ({type(error).__name__}); it is damaged, or "
                "holds what "
                "could run code; save the adapter as safetensors"
            ) from error
    if not isinstance(value, Mapping):
        raise AdapterMalformed(f"{name} holds {type(value).__name__}, not a mapping of names to tensors")
    return value


def _convert_file(folder: AdapterFolder, name: str, out: Path) -> None:
    tensors = {}
    for key, value in _load(folder, name).items():
        where = f"{name}: {str(key)[:100]!r}"
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise AdapterMalformed(f"{where} is {type(value).__name__}; each entry must be a name with a tensor")
        if value.layout != torch.strided or value.dtype not in _DTYPES:
            raise AdapterUnsupported(
                f"{where} is {value.dtype}, {value.layout}; adapters are dense float32, bfloat16 or float16"
            )
        # A view can claim far more elements than its storage has.
        if (num_bytes := value.numel() * value.element_size()) > folder.limits.max_bytes:
            raise AdapterTooLarge(f"{where} has {num_bytes} bytes; at most {folder.limits.max_bytes} are accepted")
        tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
    path = out / (name.removesuffix(".bin") + ".safetensors")
    save_file(tensors, path, {"format": "pt"})
    fsync_file(path)


def _copy(folder: AdapterFolder, name: str, out: Path) -> None:
    (out / name).write_bytes(folder.read_small(name, 1024**2))
