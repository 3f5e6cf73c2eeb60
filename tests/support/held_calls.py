"""Functions of the product that fail, or wait, when a test wants it."""

import threading
from typing import Any

import pytest


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, times: int = 1) -> None:
    """The method raises for the first calls."""
    method, left = getattr(owner, name), [error] * times

    def fail(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, fail)


class Held:
    """A function whose calls, or those that `is_meant`, wait inside until `go_on` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, is_meant: Any = lambda *_: True) -> None:
        self.begun, self.go_on, function = threading.Event(), threading.Event(), getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            if is_meant(*arguments):
                self.begun.set()
                assert self.go_on.wait(60)
            return function(*arguments, **options)

        patch.setattr(owner, name, held)
