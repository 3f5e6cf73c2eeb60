"""Open the tensors of an adapter's directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import AdapterError, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.safetensors_file import SafetensorsFile, open_safetensors

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@contextmanager
def open_weights(folder: AdapterFolder, stem: str) -> Iterator[SafetensorsFile]:
    """Open `stem`.safetensors."""
    name = f"{stem}.safetensors"
    if name not in folder.names:
        raise no_weights(folder, name)
    with open_safetensors(folder, name) as file:
        yield file


def no_weights(folder: AdapterFolder, wanted: str) -> AdapterError:
    """The error for a directory without its safetensors file; it may have shards or pickles instead."""
    if f"{wanted}.index.json" in folder.names:
        return AdapterUnsupported(f"{folder.directory} has its weights in several files; save them as one {wanted}")
    if pickles := sorted(name for name in folder.names if name.endswith(_PICKLE_SUFFIXES)):
        return AdapterUnsupported(
            f"{folder.directory} has its weights in {pickles[0]}, a pickle, which can run code when it is read; save "
            "it as safetensors (save_pretrained does), or convert it once: `prelude adapters verify ADAPTER --model "
            "MODEL --allow-pickle NEW_DIRECTORY`"
        )
    return AdapterMalformed(f"{folder.directory} has no {wanted}; the adapter's weights are missing")
