"""Cost in calls of functions: equal on every machine, and beside other processes."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Self


class Calls:
    """Counts calls of Python functions, and steps of coroutines; with `builtins` those in C, too."""

    def __init__(self, counts: Callable[[CodeType], bool] = lambda _: True, *, builtins: bool = False) -> None:
        self.number = 0
        self._counts = counts
        self._events = {"call", "c_call"} if builtins else {"call"}

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event in self._events and self._counts(frame.f_code):
            self.number += 1
