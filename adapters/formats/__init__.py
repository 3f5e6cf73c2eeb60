"""Every format in which adapters come, read into one normal form."""

from __future__ import annotations

from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats import peft_config
from adapters.formats.folder import AdapterFolder
from adapters.formats.limits import Limits
from adapters.formats.peft_lora import read_peft_lora
from adapters.normal_form import Adapter

__all__ = ["Limits", "read_adapter"]


def read_adapter(directory: Path, base: BaseModel, limits: Limits) -> Adapter:
    """Reads an adapter's directory, whatever format it is in. Raises a subclass of AdapterError, and nothing else."""
    folder = AdapterFolder(Path(directory), limits)
    readers = {peft_config.CONFIG_NAME: read_peft_lora}
    found = [name for name in readers if name in folder.names]
    if len(found) != 1:
        raise _not_one(folder, found)
    return readers[found[0]](folder, base)


def _not_one(folder: AdapterFolder, found: list[str]) -> AdapterMalformed | AdapterUnsupported:
    if found:
        return AdapterMalformed(f"{folder.directory} has {' and '.join(found)}; an adapter has one of them")
    return AdapterMalformed(
        f"{folder.directory} is no adapter: it has no {peft_config.CONFIG_NAME}; see docs/adapter-formats.md"
    )
