"""Open the tensors of an adapter's directory, in one file or in shards, as one mapping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from adapters.errors import AdapterError, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import parse_object
from adapters.formats.safetensors_file import SafetensorsFile, open_safetensors

_MAX_INDEX_BYTES = 8 * 1024**2
_MAX_SHARDS = 64
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Weights:
    """Every tensor of the opened files, by name. Valid only inside `open_weights`."""

    def __init__(self, files: dict[str, SafetensorsFile]):
        self.files = files  # tensor name -> the file that has it

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.files[tensor].tensors[tensor].shape


@contextmanager
def open_weights(folder: AdapterFolder, stem: str) -> Iterator[Weights]:
    """Open `stem`.safetensors, or the shards that `stem`.safetensors.index.json lists."""
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if single in folder.names and index in folder.names:
        raise AdapterMalformed(f"{folder.directory} has both {single} and {index}; keep the one that is meant")
    with ExitStack() as stack:
        if single not in folder.names and index not in folder.names:
            raise no_weights(folder, single)
        if single in folder.names:
            file = stack.enter_context(open_safetensors(folder, single))
            yield Weights(dict.fromkeys(file.tensors, file))
        else:
            yield Weights(_open_shards(folder, index, stack))


def _open_shards(folder: AdapterFolder, index: str, stack: ExitStack) -> dict[str, SafetensorsFile]:
    shards = parse_object(folder.read_small(index, _MAX_INDEX_BYTES), index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise AdapterMalformed(f"{index}: weight_map must map each tensor to the name of its file")
    names = sorted(set(shards.values()))
    if len(names) > _MAX_SHARDS:
        raise AdapterMalformed(f"{index} names {len(names)} files; at most {_MAX_SHARDS} are read")
    found: dict[str, SafetensorsFile] = {}
    for name in names:  # one by one: none is parsed after one that the index contradicts
        file = stack.enter_context(open_safetensors(folder, name))
        for tensor in file.tensors:
            if shards.get(tensor) != name:
                raise AdapterMalformed(f"tensor {tensor!r} is in {name}, but {index} says {shards.get(tensor)!r}")
            found[tensor] = file
    if missing := sorted(shards.keys() - found.keys()):
        raise AdapterMalformed(f"{index} lists tensor {missing[0]!r}, which {shards[missing[0]]} does not have")
    return found


def no_weights(folder: AdapterFolder, wanted: str) -> AdapterError:
    """The error for a directory without its safetensors file; it may have pickles instead."""
    if pickles := sorted(name for name in folder.names if name.endswith(_PICKLE_SUFFIXES)):
        return AdapterUnsupported(
            f"{folder.directory} has its weights in {pickles[0]}, a pickle, which can run code when it is read; save "
            "it as safetensors (save_pretrained does), or convert it once: `prelude adapters verify ADAPTER --model "
            "MODEL --allow-pickle NEW_DIRECTORY`"
        )
    return AdapterMalformed(f"{folder.directory} has no {wanted}; the adapter's weights are missing")
