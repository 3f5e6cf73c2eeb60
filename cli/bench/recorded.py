"""The command line as results show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SECRET_OPTIONS = ("--header", "--database")  # whose values may have keys or passwords
_HIDDEN = "…"
_IS_PATH = re.compile(r"(/|~/|\.{1,2}/)\S*")
_PASSWORD = re.compile(r"://[^/@\s]*@")


def recorded_command(words: Sequence[str] | None = None) -> str:
    """The command that these words make (None: this process's), without secrets and without this machine's paths.

    Paths from a root or relative to a folder lose their folders. Other slashes stay: `acme/legal` names an adapter.
    """
    shown: list[str] = []
    hides_next = False
    for word in sys.argv[1:] if words is None else words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if hides_next:
            shown[-1] = f"{shown[-1]}={_HIDDEN}"
        elif option in _SECRET_OPTIONS and equals:
            shown.append(f"{option}={_HIDDEN}")
        else:
            shown.append(option + equals + _without_folders(_PASSWORD.sub(f"://{_HIDDEN}@", value)))
        hides_next = not hides_next and word in _SECRET_OPTIONS
    return " ".join(["prelude", *shown])


def _without_folders(value: str) -> str:
    return Path(value).name if _IS_PATH.fullmatch(value) else value
