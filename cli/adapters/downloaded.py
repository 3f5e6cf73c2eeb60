"""An adapter that a command downloads from the Hugging Face Hub."""

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from adapters.errors import AdapterError, AdapterUnsupported, HubFailed
from adapters.files.work_folder import work_folder
from adapters.formats import CONFIGS, FILES
from adapters.formats.lineage import downloaded_from
from router.public_errors import without_path

_OTHER_FILES_BYTES = 64 * 1024**2  # configuration and tokenizer, beside the weights


@contextmanager
def adapter_directory(named: str, max_bytes: int) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """(directory, lineage) of a directory, or of hf://…, of which a copy exists inside the block.

    `max_bytes`: of its weights. Raises AdapterError.
    """
    if not named.startswith("hf://"):
        yield Path(named), ()
        return
    try:
        from adapters.hub import fetch, parse, shown
    except ImportError as error:
        raise HubFailed(f"{error.name} is not installed; `pip install huggingface_hub`, or name a directory") from error
    found = fetch(parse(named), _adapter_files, max_bytes + _OTHER_FILES_BYTES)
    with work_folder("import") as folder:
        for name in found.sizes:  # which are links in the cache; no import follows links
            shutil.copyfile(found.path / name, folder / name)
        try:
            yield folder, (downloaded_from(shown(found.place)),)
        except AdapterError as error:
            raise without_path(error, folder, shown(found.place)) from None


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
