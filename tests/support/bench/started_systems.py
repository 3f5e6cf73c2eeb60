"""Benchmarks of systems that they start, with mock servers in place of engines and clusters."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.bench.streaming_mock import MockServer

from bench.load.options import Endpoint
from bench.matrix.options import Options
from bench.matrix.systems import Starter


def start_mocks(monkeypatch: pytest.MonkeyPatch, server_of: Callable[[str], MockServer]) -> list[Options]:
    """Start a system as its mock server; returns the options of each that was checked, in order."""
    seen: list[Options] = []

    async def write_model(_self: Starter) -> Any:
        return SimpleNamespace(vocabulary=1000)

    async def prepare(*_given: object) -> dict[str, Any]:
        return {}

    async def check(self: Starter, *_given: object) -> None:
        seen.append(self.options)

    async def start(self: Starter, name: str, _adapters: Any) -> Endpoint:
        server = await self.stack.enter_async_context(server_of(name).running())
        adapters = tuple(f"a{number}" for number in range(self.options.max_adapters))
        return Endpoint(server.url, "mock", adapters, "none" if name == "none" else "lora_path")

    monkeypatch.setattr(Starter, "_write_model", write_model)
    monkeypatch.setattr(Starter, "_prepare", prepare)
    monkeypatch.setattr(Starter, "_start", start)
    monkeypatch.setattr(Starter, "_check", check)
    return seen
