"""Calls to several workers at once, with one outcome each."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import RouterError

_MAX_CALLS = 64  # concurrent, for each request


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of calls to several workers, by worker."""

    seconds: Mapping[str, float]  # of the calls that succeeded
    errors: Mapping[str, RouterError]

    @property
    def all_failed(self) -> bool:
        return bool(self.errors) and not self.seconds

    def described(self) -> dict[str, Any]:
        """For an HTTP answer: seconds or the error, by worker."""
        errors = {name: {"error": {"code": each.code, "message": str(each)}} for name, each in self.errors.items()}
        return dict(sorted({**{name: round(s, 4) for name, s in self.seconds.items()}, **errors}.items()))


async def on_each(workers: Collection[str], call: Callable[[str], Awaitable[object]]) -> Outcomes:
    """Call workers concurrently. A failing call does not cancel the others. `call` must have its own deadline."""
    seconds: dict[str, float] = {}
    errors: dict[str, RouterError] = {}
    slots = asyncio.Semaphore(_MAX_CALLS)

    async def one(name: str) -> None:
        async with slots:
            began_at = time.monotonic()
            try:
                await call(name)
                seconds[name] = time.monotonic() - began_at
            except RouterError as error:
                errors[name] = error

    async with asyncio.TaskGroup() as group:
        for name in workers:
            group.create_task(one(name), name=f"adapter call to {name}")
    return Outcomes(seconds, errors)
