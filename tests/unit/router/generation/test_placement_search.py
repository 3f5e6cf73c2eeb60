"""What a search for a placement tells while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router.errors import AdapterRevisionGone
from router.generation import placement_search as module
from router.generation.placement_search import PlacementSearch
from router.placement.request import PromptSize


def search(placement: Any, wait_until: Callable[[Callable[[], bool], float], Any]) -> PlacementSearch:
    placer = SimpleNamespace(observe=lambda request: request, place=lambda *_: placement)
    fleet = SimpleNamespace(state=None, wait_until=wait_until)
    backends: Any = SimpleNamespace(placer=placer, fleet=fleet, config=SimpleNamespace(first_event_timeout_s=1))
    return PlacementSearch(backends, None, PromptSize(1, 1), "request", namespace="")


def test_a_sequence_that_waits_for_its_revision_takes_no_room_meanwhile(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(module, "unplaceable_error", lambda *_: AdapterRevisionGone("gone"))

    async def wait_until(*_: Any) -> None:
        said.append("waits")

    async def scenario() -> None:
        with pytest.raises(AdapterRevisionGone):
            await search(None, wait_until).first(on_wait=lambda: said.append("needs no room"))
        await search("a placement", wait_until).first(on_wait=lambda: said.append("wrong"))

    asyncio.run(scenario())
    assert said == ["needs no room", "waits"]
