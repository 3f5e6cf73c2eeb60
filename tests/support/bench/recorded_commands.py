"""What an earlier release's command line took and answered, recorded and run again.

Imports nothing of the product, so that it runs beside any release.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def arguments_of(parser: argparse.ArgumentParser, name: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Of every command its options and positional arguments: what each takes, and what it is without being given."""
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                found |= arguments_of(command, (*name, word))
        elif not isinstance(action, argparse._HelpAction):
            default = list(action.default) if isinstance(action.default, tuple) else action.default
            found.setdefault(" ".join(name), {})["/".join(action.option_strings) or action.dest] = {
                "required": action.required,
                "num_values": action.nargs,
                "choices": None if action.choices is None else list(action.choices),
                "default": str(default) if isinstance(default, Path) else default,
            }
    return found


def run(main: Callable[[list[str]], None], words: Sequence[str]) -> dict[str, Any]:
    """The exit status of a command, the JSON that it printed, and whether it said why it failed."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as ended:
            status = int(ended.code or 0)
    printed = json.loads(out.getvalue()) if "--json" in words and out.getvalue() else bool(out.getvalue())
    return {"status": status, "printed": printed, "has_error": bool(err.getvalue().strip())}
