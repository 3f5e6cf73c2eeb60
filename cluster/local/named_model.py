"""The base model that somebody names: a directory, or a repository of the Hugging Face Hub."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from adapters.errors import AdapterError, BaseModelInvalid, HubFailed, InvalidReference
from adapters.model.base_model import BaseModel
from cluster.errors import ConfigError, StartError
from cluster.local.memory_plan import INDEX_NAME, weight_files

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[^/]+)?")
_SMALL_FILES = (
    "config.json", "generation_config.json", INDEX_NAME, "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_WEIGHTS = ".safetensors"

Say = Callable[[str], None]


def model_directory(named: str, say: Say) -> Path:
    """The directory of a model that is one, or OWNER/REPOSITORY[@REVISION] of the Hub, downloaded into its cache.

    `say` gets a line before something that takes long. Raises AdapterError, and ImportError without the Hub's library.
    """
    path = Path(named)
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
    listed: list[str] = []

    def small(sizes: Mapping[str, int]) -> Collection[str]:
        listed.extend(sizes)
        return [name for name in _SMALL_FILES if name in sizes]

    found = fetch(place, small)
    if "config.json" not in found.sizes or not any(name.endswith(_WEIGHTS) for name in listed):
        raise HubFailed(
            "it has no config.json with weights in safetensors (pickled weights and GGUF are not read); many models "
            "have a converted copy"
        )
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
