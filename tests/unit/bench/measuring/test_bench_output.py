"""A benchmark that is ended early leaves what it has measured, in a file that says that it ended early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import SystemFailed
from bench.measuring.output import growing_json


def test_a_file_that_is_there_stays_until_something_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")
    with pytest.raises(SystemFailed), growing_json({}, path, "after all"):
        raise SystemFailed("it did not start")
    assert path.read_text() == "before"
    with growing_json({"a": 1}, path, "after all"):
        pass
    assert json.loads(path.read_text()) == {"a": 1, "ended": "after all"}


class Killed(BaseException):
    """What ends the process; nothing catches it."""


@pytest.mark.parametrize(("error", "ended"), [(Killed(), "early"), (SystemFailed("it died"), "early: it died")])
def test_a_run_that_fails_leaves_what_it_measured(error: BaseException, ended: str, tmp_path: Path) -> None:
    document: dict[str, Any] = {"rows": []}

    def measure() -> None:
        with growing_json(document, tmp_path / "x.json", "after all") as write:
            document["rows"].append(1)
            write()
            raise error

    with pytest.raises(type(error)):
        measure()
    assert json.loads((tmp_path / "x.json").read_text()) == {"rows": [1], "ended": ended}
