"""Tiny models, a small tokenizer with a chat template, and files of rows."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.small_runs import write_jsonl
from support.training.training_models import make_tiny

from adapters.model.base_model import BaseModel
from training.data.tokens import Encoder

WriteRows = Callable[..., Path]
Tiny = tuple[Any, BaseModel]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """tiny(family, dtype): (model, sizes). Tests leave the model as they found it."""

    @cache
    def make(family: str, dtype: torch.dtype = torch.float64) -> Tiny:
        torch.set_num_threads(1)
        return make_tiny(family, tmp_path_factory.mktemp(family), dtype)

    return make


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
        return write_jsonl(tmp_path / name, rows)

    return write
