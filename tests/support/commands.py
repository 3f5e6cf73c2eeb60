"""Runs `prelude …` in this process."""

import json
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from cli.main import main


@dataclass(frozen=True)
class Prelude:
    """Runs commands. `begin` and `end`: the words that all of them have."""

    capture: pytest.CaptureFixture[str]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)"""
        status, command = 0, [str(word) for word in (*self.begin, *words, *self.end)]
        try:
            with patch("sys.argv", ["prelude", *command]):
                main(command)
        except SystemExit as ended:
            status = int(ended.code or 0)
        output = self.capture.readouterr()
        return status, output.out, output.err

    def prints(self, *words: object, status: int = 0) -> str:
        """What a command prints that ends with this status."""
        found, output, errors = self(*words)
        assert found == status, errors
        return output

    def json(self, *words: object, status: int = 0) -> Any:
        """What it prints with --json."""
        return json.loads(self.prints(*words, "--json", status=status))

    def refuses(self, *words: object, says: str | tuple[str, ...], status: int = 1) -> str:
        """What a command prints that ends with this status and with an error that has all these words."""
        found, output, errors = self(*words)
        assert found == status, errors
        for each in (says,) if isinstance(says, str) else says:
            assert each in errors, errors
        return output
