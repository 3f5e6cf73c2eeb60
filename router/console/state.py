"""The fleet and the requests in flight, as the console shows them; computed at most every half second."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.console.page import HEADERS
from router.fleet.fleet_state import FleetState, WorkerView
from router.generation.backends import Backends
from router.generation.request import Requests

_MIN_AGE_S = 0.5  # an answer is given again until then, however many browsers ask
_MAX_WORKERS = 200
_MAX_WARM = 64  # decode workers named per prefill worker
_MAX_REQUESTS = 100
_MAX_POLICIES = 200
_MAX_SEQUENCES = 8  # of a request


class ConsoleState:
    """GET /console/state, and /console/policies."""

    def __init__(
        self,
        backends: Backends,
        requests: Requests,
        clock: Callable[[], float] = time.monotonic,
        role_change: Callable[[], str] = str,
        policies: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None,
    ) -> None:
        """`policies`: those that are trained, of all tenants; None: nothing is trained here."""
        self._backends = backends
        self._requests = requests
        self._role_change = role_change
        self._policies = policies
        self._clock = clock
        self._made: bytes | None = None
        self._made_at = 0.0
        # New at each start, so that nobody takes differences between two routers behind one address.
        self._router = secrets.token_hex(6)

    async def state(self, _: Request) -> Response:
        """The newest state. Counters count from the router's start, and the page takes differences."""
        now = self._clock()
        if self._made is None or now - self._made_at >= _MIN_AGE_S:
            self._made, self._made_at = msgspec.json.encode(self._state()), now
        return Response(self._made, headers=HEADERS, media_type="application/json")

    @property
    def is_trained(self) -> bool:
        return self._policies is not None

    async def policies(self, _: Request) -> Response:
        """The policies in training. Raises TrainerUnavailable."""
        found = [] if self._policies is None else await self._policies()
        body = msgspec.json.encode({"policies": found[-_MAX_POLICIES:], "num_policies": len(found)})
        return Response(body, headers=HEADERS, media_type="application/json")

    def _state(self) -> dict[str, Any]:
        fleet, first_tokens = self._backends.fleet.state, _buckets(self._backends.metrics.first_byte.collect())
        shown = sorted(fleet.workers.values(), key=lambda view: (view.is_placeable, view.name))[:_MAX_WORKERS]
        return {
            "model": self._backends.model,
            "router": self._router,
            "at_s": self._clock(),  # of this machine: for differences between states of one router
            "workers": [_worker(view, fleet) for view in sorted(shown, key=lambda view: view.name)],
            "num_workers": len(fleet.workers),
            "role_change": self._role_change(),  # why a role was changed last, or would have been
            "num_placeable": sum(view.is_placeable for view in fleet.workers.values()),
            "requests": [_bounded(each) for each in self._requests.described(_MAX_REQUESTS)],
            "num_requests": len(self._requests),
            "first_token_le_s": [None if bound == math.inf else bound for bound in first_tokens],
            "tokens": self._requests.num_output_tokens,
            "first_tokens": list(first_tokens.values()),
        }


def _worker(view: WorkerView, fleet: FleetState) -> dict[str, Any]:
    load = fleet.loads[view.name]
    warm = fleet.warm_decodes(view) if view.role == "prefill" else ()
    return {
        "name": view.name,
        "role": view.role,
        "condition": view.condition,
        "reason": view.why_not_placeable,
        "domain": view.domain,
        "sequences": load.num_sequences,
        "queued_prompt_tokens": load.prompt_tokens,
        "queue_s": load.queue_s,
        "prompt_tokens_per_s": load.tokens_per_s if view.role != "decode" else None,
        "is_assumed": load.is_assumed,  # the speed and the seconds that follow from it: nothing was measured
        "kv_used": load.used_kv_tokens / load.max_kv_tokens if load.max_kv_tokens else None,
        "num_in_host_memory": len(view.residency.host),
        "num_on_disk": len(view.residency.disk),
        "num_warm": len(warm),
        "warm_with": [decode.name for decode in islice(warm, _MAX_WARM)],
    }


def _bounded(request: dict[str, Any]) -> dict[str, Any]:
    sequences = request["sequences"]
    return {**request, "sequences": sequences[:_MAX_SEQUENCES], "num_sequences": len(sequences)}


def _buckets(families: Iterable[Any]) -> dict[float, int]:
    """Cumulative counts by the upper bounds of a histogram's buckets, in order, summed over all other labels."""
    counts: Counter[float] = Counter()
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                counts[float(sample.labels["le"])] += int(sample.value)
    return dict(sorted(counts.items()))
