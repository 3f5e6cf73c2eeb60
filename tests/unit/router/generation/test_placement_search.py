"""What a search for a placement tells while it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.routers.fleets import DECODES, PREFILLS, fleet_of, warm_with

from router.errors import AdapterRevisionGone, EngineFailure
from router.generation import sequence_run as module
from router.generation.sequence_run import PlacementSearch
from router.metrics import Metrics
from router.placement.placer import Placer
from router.placement.request import PromptSize


def request_for(revision: Any) -> Any:
    validated = SimpleNamespace(generates=True)
    return SimpleNamespace(request_id="request", revision=revision, validated=validated, namespace="")


def search(placement: Any, wait_until: Callable[[Callable[[], bool], float], Any]) -> PlacementSearch:
    placer = SimpleNamespace(observe=lambda request: request, place=lambda *_: placement)
    fleet = SimpleNamespace(state=None, wait_until=wait_until)
    backends: Any = SimpleNamespace(placer=placer, fleet=fleet, config=SimpleNamespace(first_event_timeout_s=1))
    return PlacementSearch(backends, request_for(None), PromptSize(1, 1))


async def test_a_sequence_that_waits_for_its_revision_takes_no_room_meanwhile(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(module, "unplaceable_error", lambda *_: AdapterRevisionGone("gone"))

    async def wait_until(*_: Any) -> None:
        said.append("waits")

    with pytest.raises(AdapterRevisionGone):
        await search(None, wait_until).first(on_wait=lambda: said.append("needs no room"))
    await search("a placement", wait_until).first(on_wait=lambda: said.append("wrong"))
    assert said == ["needs no room", "waits"]


async def test_who_took_part_in_two_failures_is_avoided_whoever_has_reported_them():
    """A prefill worker that sends no KV: each decode worker says that the transfer failed."""
    third = replace(DECODES[0], name="d2", incarnation="d2-1")
    fleet = fleet_of(*(warm_with(prefill, "d0", "d1", "d2") for prefill in PREFILLS), *DECODES, third)
    placer = Placer(fleet.loads)
    backends: Any = SimpleNamespace(
        placer=placer,
        fleet=SimpleNamespace(state=fleet),
        config=SimpleNamespace(first_event_timeout_s=1, max_attempts=5),
        metrics=Metrics(),
    )

    revision: Any = SimpleNamespace(revision_id="sha256:a", manifest=SimpleNamespace(positions="prefill"), stored=True)
    searched = PlacementSearch(backends, request_for(revision), PromptSize(1, 1))
    placement, readers = await searched.first(), []
    for _ in range(3):
        readers.append(placement.prefill.name)
        error = EngineFailure("the transfer failed", worker=placement.decode.name)
        placement = await searched.after(error, placement)
    assert readers[0] == readers[1] != readers[2]
