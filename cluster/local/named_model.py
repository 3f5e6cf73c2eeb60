"""The base model that somebody names: a directory, a repository of the Hugging Face Hub, or a GGUF file of either."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from adapters.errors import AdapterError, BaseModelInvalid, HubFailed, InvalidReference
from adapters.files.locked_folder import LockedFolder, sweep_abandoned
from adapters.model.base_model import BaseModel
from cluster.errors import ConfigError, StartError
from cluster.local.memory_plan import INDEX_NAME, weight_files

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[^/]+)?(/[^/]+\.gguf)?")
_SMALL_FILES = (
    "config.json", "generation_config.json", INDEX_NAME, "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_WEIGHTS, _GGUF = ".safetensors", ".gguf"
_PARTIAL = "partial-"

Say = Callable[[str], None]


def model_directory(named: str, say: Say) -> Path:
    """The directory of a model that is a directory, a GGUF file, or OWNER/REPOSITORY[@REVISION][/FILE.gguf] of the Hub.

    What the Hub has is downloaded into its cache, and a GGUF file is converted into Prelude's, once. `say` gets a line
    before something that takes long. Raises AdapterError, ConfigError, and ImportError without a library for it.
    """
    path = Path(named)
    if path.is_file() and path.suffix == _GGUF:
        return _converted(path, say)
    if path.exists() or not _ID.fullmatch(named.removeprefix("hf://")):
        return path  # its readers report what is wrong with it
    try:
        return _downloaded(named.removeprefix("hf://"), say)
    except HubFailed as error:
        raise HubFailed(f"there is no directory {named} here, and {error}") from error


def say_it(text: str) -> None:
    print(text, file=sys.stderr)


def model_of_option(named: Path | str) -> Path:
    """As `model_directory`, for `--model`. Raises ConfigError and StartError."""
    try:
        return model_directory(str(named), say_it)
    except (BaseModelInvalid, InvalidReference) as error:
        raise ConfigError(f"--model: {error}") from error
    except AdapterError as error:
        raise StartError(f"--model: {error}") from error
    except ImportError as error:
        raise StartError(f"--model: {error.name}, which reads it, is not installed; name a directory") from error


def _downloaded(named: str, say: Say) -> Path:
    from adapters.hub import fetch, parse

    place = parse(f"hf://{named}")
    if file := place.path_in_repo:
        return _converted(
            fetch(replace(place, path_in_repo=""), lambda sizes: _gguf(sizes, file), say=say).path / file, say
        )
    listed: list[str] = []

    def small(sizes: Mapping[str, int]) -> Collection[str]:
        listed.extend(sizes)
        return [name for name in _SMALL_FILES if name in sizes]

    found = fetch(place, small)
    if "config.json" not in found.sizes or not any(name.endswith(_WEIGHTS) for name in listed):
        found = fetch(place, _gguf, say=say)
        return _converted(found.path / next(iter(found.sizes)), say)
    BaseModel.read(found.path)  # before gigabytes are downloaded
    if INDEX_NAME in found.sizes:
        wanted = [path.name for path in weight_files(found.path)]
    else:
        wanted = [name for name in listed if name.endswith(_WEIGHTS) and not name.startswith("consolidated")]

    def weights(sizes: Mapping[str, int]) -> Collection[str]:
        if missing := next((name for name in wanted if name not in sizes), None):
            raise HubFailed(f"it has no {missing}, which {INDEX_NAME} names")
        return wanted

    return fetch(found.place, weights, say=say).path


def _gguf(sizes: Mapping[str, int], wanted: str | None = None) -> Collection[str]:
    """The file that is wanted, or the only one. Raises HubFailed."""
    there = sorted(name for name in sizes if name.endswith(_GGUF))
    if not there:
        raise HubFailed(
            "it has neither a config.json with weights in safetensors nor a GGUF file (pickled weights are not read); "
            "many models have a converted copy"
        )
    if wanted not in there and (wanted or len(there) > 1):
        raise HubFailed(f"it has {', '.join(there[:20])}; name one of them: OWNER/REPOSITORY/FILE{_GGUF}")
    return [wanted or there[0]]


def _converted(file: Path, say: Say) -> Path:
    """The directory of a GGUF file's model in bfloat16, in the cache by the digest of the file; converted once.

    Raises ConfigError for a file that cannot be converted.
    """
    from cluster.local.demo import save_model
    from cluster.local.pretrained import read_gguf

    parent = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prelude" / "models"
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from error
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        folder = parent / digest[:16]
        if folder.is_dir():
            return next(folder.iterdir())
        sweep_abandoned(_PARTIAL, parent)
        with closing(LockedFolder(_PARTIAL, digest[:16], parent)) as partial:
            say(f"Converting {file.name} to bfloat16, once.")
            save_model(*read_gguf(file), partial.path / "made" / file.stem)  # which is the model's name in requests
            if not folder.is_dir():  # another process may have been faster
                (partial.path / "made").rename(folder)
    except ImportError:
        raise
    except Exception as error:  # the parsers of other people's files raise anything, and bare ones, too
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{file} cannot be converted: {reason}; name the model's Hugging Face directory") from error
    return next(folder.iterdir())
