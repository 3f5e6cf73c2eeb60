"""The base model that somebody names: a directory, a repository of the Hugging Face Hub, or a GGUF file of either."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from adapters.errors import BaseModelInvalid, HubFailed
from adapters.files.locked_folder import LockedFolder, sweep_abandoned
from adapters.hub import SCHEME, HubReference, fetch
from adapters.model.base_model import BaseModel
from cluster.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[^/]+)?(/[^/]+\.gguf)?")
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 1024**2
_SMALL_FILES = (
    "config.json", "generation_config.json", _INDEX, "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_GGUF = ".gguf"
_PARTIAL = "partial-"

Say = Callable[[str], None]


def model_directory(named: str, say: Say) -> Path:
    """The directory of a model that is a directory, a GGUF file, or OWNER/REPOSITORY[@REVISION][/FILE.gguf] of the Hub.

    What the Hub has is downloaded into its cache, and a GGUF file is converted into Prelude's, once. `say` gets a line
    before something that takes long. Raises AdapterError and ConfigError.
    """
    path = Path(named)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == _GGUF:
        return converted(path, say)
    if not named.startswith(SCHEME) and not _ID.fullmatch(named):
        return path  # which its readers report
    try:
        return _downloaded(HubReference.parse(f"{SCHEME}{named.removeprefix(SCHEME)}"), say)
    except HubFailed as error:
        missing = "" if named.startswith(SCHEME) else f"there is no directory {named} here, and "
        raise HubFailed(f"{missing}{error}") from error


def name_of_snapshot(path: Path) -> str | None:
    """The repository's name of a folder in the Hub's cache; None for another folder."""
    folder = path.parents[1].name if len(path.parents) > 1 else ""
    return folder.rpartition("--")[2] if path.parent.name == "snapshots" and folder.startswith("models--") else None


def _downloaded(reference: HubReference, say: Say) -> Path:
    folder, _, file = reference.path.rpartition("/")
    if file.endswith(_GGUF):
        found = fetch(replace(reference, path=folder), lambda sizes: _one_gguf(sizes, file), None, say)
        return converted(found.path / file, say)
    listed: list[str] = []

    def small(sizes: Mapping[str, int]) -> Collection[str]:
        listed.extend(sizes)
        return [name for name in _SMALL_FILES if name in sizes]

    found = fetch(reference, small, None)
    if "config.json" not in found.sizes or not any(name.endswith(".safetensors") for name in listed):
        found = fetch(found.reference, _one_gguf, None, say)
        return converted(found.path / next(iter(found.sizes)), say)
    BaseModel.read(found.path)  # before gigabytes are downloaded
    wanted = _shards(found.path / _INDEX) if _INDEX in found.sizes else None
    return fetch(found.reference, lambda sizes: _weights(sizes, wanted), None, say).path


def _weights(sizes: Mapping[str, int], wanted: Collection[str] | None) -> Collection[str]:
    if wanted is None:
        wanted = [name for name in sizes if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if missing := [name for name in wanted if name not in sizes]:
        raise HubFailed(f"it has no {missing[0]}, which {_INDEX} names")
    return wanted


def _shards(index: Path) -> Collection[str]:
    try:
        with index.open("rb") as file:
            names = set(json.loads(file.read(_MAX_INDEX_BYTES))["weight_map"].values())
        if bad := next((name for name in names if "/" in name or not name.endswith(".safetensors")), None):
            raise ValueError(f"it names {bad[:80]!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelInvalid(f"{index} cannot be read: {error!r}") from error
    return sorted(names)


def _one_gguf(sizes: Mapping[str, int], name: str | None = None) -> Collection[str]:
    there = sorted(each for each in sizes if each.endswith(_GGUF))
    if name is None and len(there) == 1:
        return there
    if name is not None and name in there:
        return [name]
    if there:
        raise HubFailed(f"it has {', '.join(there[:20])}; name one of them: OWNER/REPOSITORY/FILE{_GGUF}")
    raise HubFailed(
        "it has neither a config.json with weights in safetensors nor a GGUF file, and pickled weights are not read; "
        "many models have a converted copy"
    )


def converted(file: Path, say: Say) -> Path:
    """The directory of a GGUF file's model in bfloat16, in the cache by the digest of the file; converted once.

    Raises ConfigError for a file that cannot be converted.
    """
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        parent = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prelude" / "models"
        folder = parent / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', file.stem)[:80]}-{digest[:16]}"
        if folder.is_dir():
            return folder
        parent.mkdir(parents=True, exist_ok=True)
        sweep_abandoned(_PARTIAL, parent)
        partial = LockedFolder(_PARTIAL, digest[:16], parent)
        try:
            _convert(file, partial.path / "model", say)
            try:
                (partial.path / "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # another process may have been faster
                    raise
        finally:
            partial.close()
    except OSError as error:
        raise ConfigError(f"{file} cannot be converted: {error.strerror or error}") from error
    return folder


def _convert(file: Path, into: Path, say: Say) -> None:
    try:
        from cluster.local.demo import save_model
        from cluster.local.pretrained import read_gguf
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed, which reads GGUF files; name a Hugging Face directory"
        ) from error
    say(f"Converting {file.name} to bfloat16, once.")
    try:
        model, tokenizer = read_gguf(file)
    except Exception as error:  # the parsers of other people's files raise anything, and bare ones, too
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{file} cannot be converted: {reason}; name the model's Hugging Face directory") from error
    save_model(model, tokenizer, into)
