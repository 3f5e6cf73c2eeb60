"""The queue in which requests wait for their turn while the fleet is saturated, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.config.quotas import FairQueueConfig, QuotasConfig
from router.errors import QueuedTooLong, QueueFull
from router.metrics import Metrics
from router.quotas.fair_queue import FairQueue

_LOOK_S = 0.01  # between two looks at the fleet, beside those when a prompt or a sequence has ended

HasCapacity = Callable[[float, float], bool]  # for that many tokens of prompts, and sequences, that are on their way


class AdmissionQueue:
    """The requests that wait while the fleet is saturated; tenants take turns. Use from one event loop."""

    def __init__(
        self, quotas: QuotasConfig, config: FairQueueConfig, has_capacity: HasCapacity, metrics: Metrics
    ) -> None:
        self._quotas = quotas
        self._config = config
        self._has_capacity = has_capacity
        self._metrics = metrics
        self._queue: FairQueue[Turn] = FairQueue()
        self.tokens_waiting = 0  # of prompts
        self._tokens_coming = 0.0  # of prompts whose turn has come, and which are not placed yet
        self._sequences_coming = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def take(self, tenant: str, *, prompt_tokens: int, output_tokens: int, num_sequences: int) -> Turn:
        """Wait for a turn, unless nobody waits and the fleet has capacity. Use it with `with`, so that it ends.

        Raises QueueFull and QueuedTooLong.
        """
        turn = Turn(self, tenant, prompt_tokens, output_tokens, num_sequences)
        if not self._queue and self._has_capacity(self._tokens_coming, self._sequences_coming):
            self._begin(turn)
            return turn
        await self._wait(turn)
        return turn

    def look(self) -> None:
        """Check whether the fleet has capacity now. Cheap while nobody waits."""
        if self._queue:
            self._dispatch()

    async def _wait(self, turn: Turn) -> None:
        config, tenant, loop = self._config, turn.tenant, asyncio.get_running_loop()
        if self._queue.num_of(tenant) >= config.max_requests:
            raise QueueFull(
                f"the cluster is saturated, and {config.max_requests} requests of tenant {tenant} wait, which is the "
                "most; try again soon"
            )
        began_at = loop.time()
        granted = turn.granted = loop.create_future()
        weight = self._quotas.of_tenant(tenant).weight
        self._queue.push(tenant, weight, turn, turn.prompt_tokens + turn.output_tokens)
        self.tokens_waiting += turn.prompt_tokens
        deadline = loop.call_later(config.timeout_s, _expire, granted)
        self._dispatch()
        try:
            if not await granted:
                raise QueuedTooLong(
                    f"the cluster is saturated: this request was not begun within {config.timeout_s:g} s; try again"
                )
        except BaseException:
            self._queue.remove(tenant, turn)
            turn.end()
            raise
        finally:
            deadline.cancel()
            self.tokens_waiting -= turn.prompt_tokens
            label = tenant if tenant in self._quotas.tenants else "other"
            self._metrics.queue_seconds.labels(label).observe(loop.time() - began_at)

    def _dispatch(self) -> None:
        while self._queue and self._has_capacity(self._tokens_coming, self._sequences_coming):
            turn = self._queue.pop()
            assert turn is not None
            if turn.granted is not None and not turn.granted.done():
                self._begin(turn)
                turn.granted.set_result(True)
        if self._queue and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._dispatch()

    def _begin(self, turn: Turn) -> None:
        turn.num_coming = turn.num_sequences
        self._tokens_coming += turn.prompt_tokens
        self._sequences_coming += turn.num_sequences

    def _came(self, turn: Turn, num_sequences: int) -> None:
        """Note that this many of the turn's sequences were placed, or ended without being placed."""
        turn.num_coming -= num_sequences
        self._sequences_coming -= num_sequences
        self._tokens_coming -= turn.prompt_tokens * num_sequences / turn.num_sequences
        if not self._sequences_coming:
            self._tokens_coming = 0.0  # without what rounding has left
        self.look()

    def _settle(self, turn: Turn, tokens: float) -> None:
        self._queue.settle(turn.tenant, tokens)


class Turn:
    """One request's turn."""

    __slots__ = ("_queue", "granted", "num_coming", "num_sequences", "output_tokens", "prompt_tokens", "tenant")

    def __init__(
        self, queue: AdmissionQueue, tenant: str, prompt_tokens: int, output_tokens: int, num_sequences: int
    ) -> None:
        self._queue = queue
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens  # of all sequences
        self.output_tokens = output_tokens
        self.num_sequences = num_sequences
        self.num_coming = 0  # sequences whose turn has come, and which are not placed yet
        self.granted: asyncio.Future[bool] | None = None  # None: it did not wait

    def placed(self) -> None:
        """Note that one of its sequences was placed."""
        if self.num_coming:
            self._queue._came(self, 1)

    def settle(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Replace an ended request's estimates by its actual tokens. None: unknown, so the estimate stands."""
        if self.granted is not None:
            more = 0 if prompt_tokens is None else prompt_tokens - self.prompt_tokens
            more += 0 if output_tokens is None else output_tokens - self.output_tokens
            self._queue._settle(self, more)

    def end(self) -> None:
        """Idempotent."""
        if self.num_coming:
            self._queue._came(self, self.num_coming)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _expire(granted: asyncio.Future[bool]) -> None:
    if not granted.done():
        granted.set_result(False)
