"""What an adapter's directory says of the base model that it was trained with, compared with the one here.

Trainers save the tokenizer and the chat template beside an adapter. Prompts are tokenized and rendered with the base
model's, so tokens that it lacks are refused, and what only may matter is a warning, kept with the revision.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import is_integer, parse_object
from adapters.model.base_model import BaseModel

_MAX_BYTES = 64 * 1024**2  # Gemma's has 33 MB
_TOKENIZER, _SETTINGS, _ADDED, _SPECIAL = (
    "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip
_TEMPLATE = "chat_template.jinja"
FILES = (_TOKENIZER, _SETTINGS, _ADDED, _SPECIAL, _TEMPLATE)
_SHOWN = 80  # characters of a strange name
Read = Callable[[str], bytes | None]  # a file of a directory; None: it has none


def warnings_of(folder: AdapterFolder, base: BaseModel) -> list[str]:
    """What to tell whoever imports the adapter. Raises AdapterUnsupported for tokens that the base model lacks."""

    def theirs(name: str) -> bytes | None:
        return folder.read_small(name, _MAX_BYTES) if name in folder.names else None

    def ours(name: str) -> bytes | None:
        return _of_base(base, name)

    _check_tokens(theirs, ours, base)
    return [*_unread(theirs), *_template_warnings(theirs, ours), *_end_warnings(theirs, ours)]


def name_warning(where: str, named: str | None, base: BaseModel) -> Iterator[str]:
    """A warning if a directory names another base model: the sizes fit, or it would be refused."""
    if not named:
        return
    config = _parsed("config.json", _of_base(base, "config.json")) or {}
    known = [Path(base.name).name, str(config.get("_name_or_path", ""))]
    known += [part.removeprefix("models--") for part in Path(base.name).parts if part.startswith("models--")]
    if _short(named) not in {_short(name) for name in known}:
        yield (
            f"{where} says that the adapter was trained for {named[:_SHOWN]!r}; the base model here is {base.name!r}. "
            "The sizes fit: make sure that the weights are the same"
        )


def _of_base(base: BaseModel, name: str) -> bytes | None:
    try:
        return (Path(base.name) / name).read_bytes()
    except OSError:
        return None


def _short(name: str) -> str:
    """A model's name without its owner, path, case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", re.split(r"/|--", name.rstrip("/").lower())[-1])


def _check_tokens(theirs: Read, ours: Read, base: BaseModel) -> None:
    known: dict[str, int] | None = None
    for name in (_TOKENIZER, _SETTINGS, _ADDED):
        text = theirs(name)
        if text is None or text == ours(name):
            continue
        if known is None:
            known = dict(chain.from_iterable(_tokens(each, ours) for each in (_TOKENIZER, _SETTINGS, _ADDED)))
        for token, number in _tokens(name, theirs):
            if not is_integer(number):
                raise AdapterMalformed(
                    f"{name}: the id of token {token[:_SHOWN]!r} is {str(number)[:60]!r}; it must be an integer"
                )
            if known and known.get(token) != number:
                has = f"gives it id {known[token]}" if token in known else "does not have"
            elif number >= base.vocabulary:
                has = f"does not have: its vocabulary has {base.vocabulary}"
            else:
                continue
            raise AdapterUnsupported(
                f"{name} has token {token[:_SHOWN]!r} with id {number}, which the base model's tokenizer {has}; "
                "adapters cannot add tokens: train with the base model's tokenizer"
            )


def _unread(theirs: Read) -> Iterator[str]:
    for name in (_TOKENIZER, _SETTINGS, _ADDED, _SPECIAL):
        if (text := theirs(name)) is not None and _parsed(name, text) is None:
            yield f"{name} is not valid JSON, so it was not compared with the base model's"


def _parsed(name: str, text: bytes | None) -> dict[str, Any] | None:
    """None: it is absent or no sound JSON object."""
    try:
        return None if text is None else parse_object(text, name)
    except AdapterMalformed:
        return None


def _tokens(name: str, read: Read) -> Iterator[tuple[str, Any]]:
    """(token, id) of a tokenizer's file. What is no list of tokens has none."""
    fields = _parsed(name, read(name)) or {}
    if name == _ADDED:
        yield from fields.items()
    elif name == _SETTINGS:
        for number, entry in _as_object(fields.get("added_tokens_decoder")).items():
            if isinstance(content := _as_object(entry).get("content"), str):
                yield content, int(number) if number.isascii() and number.isdigit() else number
    else:
        vocabulary = _as_object(fields.get("model")).get("vocab")
        if isinstance(vocabulary, list):  # of Unigram: [token, score], the id is the place
            vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary) if _is_scored(pair)}
        yield from _as_object(vocabulary).items()
        added = fields.get("added_tokens")
        for entry in added if isinstance(added, list) else ():
            if isinstance(content := _as_object(entry).get("content"), str):
                yield content, _as_object(entry).get("id")


def _is_scored(pair: Any) -> bool:
    return isinstance(pair, list) and bool(pair) and isinstance(pair[0], str)


def _template_warnings(theirs: Read, ours: Read) -> Iterator[str]:
    own, base = _template(theirs), _template(ours)
    if own is not None and own != base:
        yield (
            "its chat template differs from the base model's, which renders the messages of chats here; send prompts "
            "that are rendered with its own to /v1/completions, or train with the base model's"
        )


def _template(read: Read) -> str | None:
    """The template for chats; of several, the default one."""
    if (text := read(_TEMPLATE)) is not None:
        return text.decode("utf-8", "replace").strip()
    found = (_parsed(_SETTINGS, read(_SETTINGS)) or {}).get("chat_template")
    if isinstance(found, list):
        default = (each for each in map(_as_object, found) if each.get("name") == "default")
        found = next(default, {}).get("template")
    return found.strip() if isinstance(found, str) else None


def _end_warnings(theirs: Read, ours: Read) -> Iterator[str]:
    own, base = _end_token(theirs), _end_token(ours)
    if own and base and own != base:
        yield (
            f"its tokenizer ends answers with {own[:_SHOWN]!r}, the base model's with {base!r}, which counts here; "
            "send the other as `stop`, or train with the base model's"
        )


def _end_token(read: Read) -> str | None:
    for name in (_SETTINGS, _SPECIAL):
        token = (_parsed(name, read(name)) or {}).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            return content
    return None


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
