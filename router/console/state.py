"""The fleet and the requests in flight, as the console shows them; computed at most every half second."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.console.page import HEADERS
from router.fleet.fleet_state import FleetState, WorkerView
from router.generation.backends import Backends
from router.generation.request import Requests
from router.processes.siblings import Siblings

SIBLING_PAGE = "console"
_MIN_AGE_S = 0.5  # an answer is given again until then, however many browsers ask
_MAX_WORKERS = 200
_MAX_WARM = 64  # decode workers named per prefill worker
_MAX_REQUESTS = 100  # of each process
_MAX_SEQUENCES = 8  # of a request

Own = dict[str, Any]


class ConsoleState:
    """GET /console/state. With several processes, the one that is asked answers for all."""

    def __init__(
        self,
        backends: Backends,
        requests: Requests,
        siblings: Siblings | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends = backends
        self._requests = requests
        self._siblings = siblings
        self._clock = clock
        self._making = asyncio.Lock()
        self._made: bytes | None = None
        self._made_at = 0.0
        # New at each start, so that nobody takes differences between two routers behind one address.
        self._router = secrets.token_hex(6) if siblings is None else siblings.router_id

    async def state(self, _: Request) -> Response:
        """The newest state. Counters count from the start of each process, and the page takes differences."""
        async with self._making:
            now = self._clock()
            if self._made is None or now - self._made_at >= _MIN_AGE_S:
                self._made, self._made_at = msgspec.json.encode(await self._state()), now
            return Response(self._made, headers=HEADERS, media_type="application/json")

    def own(self) -> bytes:
        """This process's part of the state, for the process that answers the request."""
        return msgspec.json.encode(self._own())

    async def _state(self) -> dict[str, Any]:
        number = 0 if self._siblings is None else self._siblings.number
        processes: dict[int, Own] = {number: self._own()}
        if self._siblings is not None:
            for sibling, page in (await self._siblings.ask(SIBLING_PAGE)).items():
                processes[sibling] = msgspec.json.decode(page)
        fleet = self._backends.fleet.state
        shown = sorted(fleet.workers.values(), key=lambda view: (view.is_placeable, view.name))[:_MAX_WORKERS]
        loads = [process["loads"] for process in processes.values()]
        return {
            "model": self._backends.model,
            "router": self._router,
            "at_s": self._clock(),  # of this machine: for differences between states of one router
            "workers": [_worker(view, fleet, loads) for view in sorted(shown, key=lambda view: view.name)],
            "num_workers": len(fleet.workers),
            "num_placeable": sum(view.is_placeable for view in fleet.workers.values()),
            "requests": [
                {**request, "process": process} if len(processes) > 1 else request
                for process, own in sorted(processes.items())
                for request in own["requests"]
            ],
            "num_requests": sum(own["num_requests"] for own in processes.values()),
            "first_token_le_s": _bounds(self._backends.metrics.first_byte.collect()),
            "processes": {
                str(process): {"tokens": own["tokens"], "first_tokens": own["first_tokens"]}
                for process, own in sorted(processes.items())
            },
        }

    def _own(self) -> Own:
        loads = self._backends.fleet.state.loads
        return {
            "tokens": self._requests.num_output_tokens,
            "first_tokens": _counts(self._backends.metrics.first_byte.collect()),
            "loads": {name: (load.num_sequences, load.prompt_tokens, load.queue_s) for name, load in loads.items()},
            "requests": [_bounded(each) for each in self._requests.described(_MAX_REQUESTS)],
            "num_requests": len(self._requests),
        }


def _worker(view: WorkerView, fleet: FleetState, loads: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    load = fleet.loads[view.name]
    placed = [each[view.name] for each in loads if view.name in each]
    warm = fleet.warm_decodes(view) if view.role == "prefill" else ()
    return {
        "name": view.name,
        "role": view.role,
        "condition": view.condition,
        "reason": view.why_not_placeable,
        "domain": view.domain,
        "sequences": sum(each[0] for each in placed),
        "queued_prompt_tokens": sum(each[1] for each in placed),
        "queue_s": sum(each[2] for each in placed),
        "prompt_tokens_per_s": load.tokens_per_s if view.role != "decode" else None,
        "kv_used": load.used_kv_tokens / load.max_kv_tokens if load.max_kv_tokens else None,
        "num_in_host_memory": len(view.residency.host),
        "num_on_disk": len(view.residency.disk),
        "num_warm": len(warm),
        "warm_with": [decode.name for decode in islice(warm, _MAX_WARM)],
    }


def _bounded(request: dict[str, Any]) -> dict[str, Any]:
    sequences = request["sequences"]
    return {**request, "sequences": sequences[:_MAX_SEQUENCES], "num_sequences": len(sequences)}


def _bounds(families: Iterable[Any]) -> list[float | None]:
    """Upper bounds of a histogram's buckets, in seconds. None for the last one, which is unbounded."""
    bounds = {float(s.labels["le"]) for f in families for s in f.samples if s.name.endswith("_bucket")}
    return [None if bound == float("inf") else bound for bound in sorted(bounds)]


def _counts(families: Iterable[Any]) -> list[int]:
    """Cumulative counts of a histogram's buckets, in the order of their bounds, summed over all other labels."""
    counts: dict[float, int] = {}
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + int(sample.value)
    return [counts[bound] for bound in sorted(counts)]
