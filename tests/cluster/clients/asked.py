"""What each client in Python asks, and how it tells the runner what came back. `run.py` sets the environment."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

URL, MODEL, ADAPTER = (os.environ[f"PRELUDE_{name}"] for name in ("URL", "MODEL", "ADAPTER"))
KEY = os.environ.get("PRELUDE_KEY", "none")
PROMPT = os.environ["PRELUDE_PROMPT"]
MAX_TOKENS = 200
MESSAGES = [{"role": "user", "content": PROMPT}]


class Weather(BaseModel):
    """What is asked of the tool `get_weather`."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    celsius: bool
    note: str = Field(max_length=12)


class Trip(BaseModel):
    """The answer by JSON schema: with a reference, and a field that may be null."""

    model_config = ConfigDict(extra="forbid")
    there: Weather
    back: Literal["Rome", "Oslo"] | None


def tell(*checks: Callable[[], Any]) -> None:
    """Run each check and print what it found, one JSON line each: what was received, or why nothing was."""
    with asyncio.Runner() as loop:
        for check in checks:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # clients print what they like
                    value = loop.run(check()) if inspect.iscoroutinefunction(check) else check()
                found = {"value": value}
            except Exception as error:  # noqa: BLE001 - whatever a client raises is what is to be told
                found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            print(json.dumps({"check": check.__name__, **found}), flush=True)
