"""A small tokenizer with a chat template, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.data.tokens import Encoder

WriteRows = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from cluster.local.demo import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Writes rows as JSONL; a text is a line as it is."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write
