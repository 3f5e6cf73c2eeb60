"""An adapter's directory, or one that is downloaded from the Hugging Face Hub for a command."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from adapters.errors import AdapterError, AdapterUnsupported, HubFailed
from adapters.files.work_folder import work_folder
from adapters.formats import CONFIGS, FILES
from adapters.formats.lineage import downloaded_from
from adapters.hub import SCHEME, HubReference, fetch
from router.public_errors import without_path

_OTHER_FILES_BYTES = 64 * 1024**2  # configuration and tokenizer, beside the weights


@contextmanager
def adapter_directory(place: str, max_bytes: int) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """(directory, lineage) of what `place` names: a directory, or hf://…, of which a copy exists inside the block.

    `max_bytes`: of its weights. Raises AdapterError.
    """
    if not place.startswith(SCHEME):
        yield Path(place), ()
        return
    found = fetch(HubReference.parse(place), _adapter_files, max_bytes + _OTHER_FILES_BYTES)
    with work_folder("import") as folder:
        for name in found.sizes:  # which are links in the cache; no import follows links
            shutil.copyfile(found.path / name, folder / name)
        try:
            yield folder, (downloaded_from(str(found.reference)),)
        except AdapterError as error:
            raise without_path(error, folder, str(found.reference)) from None


def _adapter_files(sizes: Mapping[str, int]) -> Collection[str]:
    chosen = [name for name in FILES if name in sizes]
    if not any(name in CONFIGS for name in chosen):
        there = ", ".join(sorted(sizes)[:10]) or "no files"
        raise HubFailed(f"this is no adapter: it has none of {', '.join(CONFIGS)}, but {there}")
    if not any(name.endswith(".safetensors") for name in chosen):
        raise AdapterUnsupported(
            "the repository has no adapter_model.safetensors (adapter.safetensors in Prelude's own layout); pickled "
            "weights are not read: load it with peft where you trust it and call save_pretrained"
        )
    return chosen
