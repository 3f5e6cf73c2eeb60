"""A tiny random Llama, what is read from it, and databases for catalogs."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters.catalog_databases import CatalogDatabase, PostgresDatabase, SqliteDatabase, postgres_server
from support.adapters.tiny_model import TINY, TINY_MIXTURES, write_model_config
from support.commands import Prelude

from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits
from adapters.model.base_model import BaseModel


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """The tiny model's sizes, without its weights."""
    return BaseModel.read(write_model_config(tmp_path_factory.mktemp("sizes")))


@pytest.fixture(scope="session")
def limits() -> Limits:
    return Limits(max_rank=16, max_bytes=64 * 1024**2)


def write_model(directory: Path, family: str, sizes: dict[str, Any]) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields = {key: value for key, value in sizes.items() if key != "architectures"}
    config = AutoConfig.for_model(family, **fields, max_position_embeddings=128, initializer_range=0.15)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, as transformers writes it."""
    return write_model(tmp_path_factory.mktemp("model"), "llama", TINY)


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Any:
    """The tiny model, loaded. Tests leave it as they found it."""
    from adapters.verification.reference import load_model

    return load_model(model_dir)


@pytest.fixture(scope="session", params=TINY_MIXTURES)
def moe_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with random weights, of each architecture, as transformers writes it."""
    return write_model(tmp_path_factory.mktemp(request.param), request.param, TINY_MIXTURES[request.param])


@pytest.fixture(scope="session")
def moe_base(moe_dir: Path) -> BaseModel:
    return BaseModel.read(moe_dir)


@pytest.fixture(scope="session")
def moe_model(moe_dir: Path) -> Any:
    """The tiny mixture of experts, loaded. Tests leave it as they found it."""
    from adapters.verification.reference import load_model

    return load_model(moe_dir)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server of this session's own."""
    with postgres_server() as url:
        yield url


_numbers = itertools.count(1)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> CatalogDatabase:
    """An empty database, once of each kind."""
    if request.param == "sqlite":
        return SqliteDatabase(tmp_path / "catalog")
    return PostgresDatabase(request.getfixturevalue("postgres"), f"catalog_{next(_numbers)}")


@pytest.fixture
def catalog(database: CatalogDatabase) -> Iterator[SqlCatalog]:
    """An empty catalog, once in each kind of database."""
    opened = SqlCatalog.open(database.url)
    yield opened
    opened.close()


@pytest.fixture
def prelude(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys)


@pytest.fixture(scope="session")
def sglang() -> None:
    """SGLang can be imported, also where there is no GPU. That takes seconds, so tests import it, not their modules."""
    import torch

    from engine import cpu_support

    cpu_support.install()
    torch.set_num_threads(1)  # for sizes this small, more would only wait for each other
