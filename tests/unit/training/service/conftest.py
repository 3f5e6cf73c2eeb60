"""One small model for all services of these tests."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.small_runs import make_model
from support.training.trainer import KillableTrainer, RawClient, make_service, served
from tinker.lib.internal_client_holder import InternalClientHolder

from cluster.local.demo import make_demo
from training.runs.base import LoadedBase, load_base

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> LoadedBase:
    torch.set_num_threads(1)
    return load_base(make_model(tmp_path_factory.mktemp("trainer") / "model"), "float32", "cpu")


@pytest.fixture(autouse=True)
def no_client_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The SDK's heartbeats would go on, and warn in the logs of later tests."""
    opened, make = [], InternalClientHolder.__init__

    def make_noted(holder: InternalClientHolder, *arguments: Any, **options: Any) -> None:
        opened.append(holder)
        make(holder, *arguments, **options)

    monkeypatch.setattr(InternalClientHolder, "__init__", make_noted)
    yield
    for holder in opened:
        holder.close()


@pytest.fixture(scope="module")
def url(base: LoadedBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service that the tests of a module share."""
    with served(make_service(base, tmp_path_factory.mktemp("service")).app()) as found:
        yield found


@pytest.fixture
def client(url: str) -> RawClient:
    """Of a tenant of its own."""
    return RawClient(url, f"tml-tenant-{next(_NUMBERS)}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trainer"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[KillableTrainer]:
    """In a process of its own."""
    found = KillableTrainer(make_demo(tmp_path / "toy"), tmp_path / "trainer")
    found.start()
    yield found
    found.kill()
