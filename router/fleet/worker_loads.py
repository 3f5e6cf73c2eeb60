"""The load of each worker: this router's own sequences there, the engine's reports, and its measured prefill speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from router.fleet.queues import NO_QUEUES, Queues

_MAX_BUSY_S = 20.0  # observations are halved at this age, so that a rate follows its worker
_INITIAL_TOKENS_PER_S = 5000.0  # until any worker has read a prompt
_INITIAL_BUSY_S = 0.02  # weight of that, as seconds of observation
_FLEETS_BUSY_S = 0.5  # weight of the fleet's rate in a worker's
_SHORT_ANSWER_TOKENS = 16  # nobody waits for their pace
_HALF_LIFE_S = 30.0  # of what a worker was seen to do, once it reads nothing
# Equal workers seem to differ by as much. If that counted, all prompts for an idle fleet would go to the one that
# lately seemed the fastest; if it does not, homes decide.
_ALIKE = 0.2
_LONGEST = 4.0  # of an observation in the fleet's rate, as a multiple of what was expected
_REMEMBERED = 1 - 1 / 500  # of the fleet's rate, at each prompt: many from prefix caches must not outweigh new ones
_NEWS = 0.05  # relative change of the fleet's rate from which on workers get it
_MAX_ROUTERS = 256
_WEIGHT_OF_NEWEST = 0.1  # of prompts' sizes
_KEPT_OF_STEPS = 0.9  # at each report, of those before: there are five in a second
# What reports say of other routers' prompts is up to 0.2 s old, and all routers act on it at once: counted in full, the
# simulator's routers leave busy workers together, and some wait longer than without it.
_OTHERS_WEIGHT = 0.5


class ReadingRate:
    """A moving average of seconds per prompt token, while there are prompts to read."""

    def __init__(self, busy_s: float = 0.0, tokens: float = 0.0) -> None:
        """The arguments are an observation to begin with."""
        self._busy_s, self._tokens = busy_s, tokens
        self.s_per_token = busy_s / tokens if tokens else 0.0  # 0: nothing was observed

    def observe(self, busy_s: float, tokens: float) -> None:
        self._busy_s += busy_s
        self._tokens += tokens
        if self._busy_s > _MAX_BUSY_S:
            self._busy_s /= 2
            self._tokens /= 2
        # A worker that has read next to nothing must not look infinitely slow.
        self._tokens = max(self._tokens, self._busy_s)
        self.s_per_token = self._busy_s / self._tokens if self._tokens else 0.0

    def fade(self, share: float) -> None:
        """Keep a share of the weight of all observations so far."""
        self._busy_s *= share
        self._tokens *= share

    def blended(self, busy_s: float, s_per_token: float, share: float) -> float:
        """The rate with one more observation, of `busy_s` at `s_per_token`, and `share` of the weight of its own."""
        return (share * self._busy_s + busy_s) / (share * self._tokens + busy_s / s_per_token)


class Spent(NamedTuple):
    """What an engine has spent its time with, since its start."""

    reading_us: int = 0  # of batches of prompts
    decode_steps: int = 0
    decode_us: int = 0  # of these


class ReportedSteps:
    """Seconds of a unified worker's decode step, without the prompts between steps, by its engine's reports."""

    def __init__(self) -> None:
        self.step_s = 0.0  # 0: unknown
        self._seen, self._at = Spent(), 0.0
        self._steps = self._step_s = 0.0  # lately

    def report(self, now: float, spent: Spent) -> None:
        """Take over counts since the engine's start. The first ones only say where to count from."""
        if spent.decode_steps == self._seen.decode_steps:
            return
        (seen, at), (self._seen, self._at) = (self._seen, self._at), (spent, now)
        if not 0 < seen.decode_steps < spent.decode_steps:
            return
        # An engine that prepares a batch while it computes the one before counts that time twice.
        reading_s = min((spent.reading_us - seen.reading_us) / 1e6, now - at)
        step_s = min((spent.decode_us - seen.decode_us) / 1e6, now - at - reading_s)
        self._steps = _KEPT_OF_STEPS * self._steps + spent.decode_steps - seen.decode_steps
        self._step_s = _KEPT_OF_STEPS * self._step_s + step_s
        self.step_s = self._step_s / self._steps


class ReportedReading:
    """Seconds per prompt token that is not in the prefix cache, by the counts in an engine's reports."""

    def __init__(self) -> None:
        self._rate = ReadingRate()
        self._tokens = self._us = 0
        self._at = 0.0  # when the counts last changed

    @property
    def s_per_token(self) -> float:
        """0: unknown."""
        return self._rate.s_per_token

    def report(self, now: float, tokens: int, us: int) -> None:
        """Take over counts since the engine's start. The first ones only say where to count from."""
        if tokens == self._tokens:
            return
        if 0 < self._tokens < tokens:
            # An engine prepares a batch while it computes the one before, and counts that time twice.
            self._rate.observe(min((us - self._us) / 1e6, now - self._at), tokens - self._tokens)
        self._tokens, self._us, self._at = tokens, us, now


class WorkerLoad:
    """One worker's load. Mutable; `WorkerLoads` owns it and placement only reads it."""

    def __init__(
        self,
        on_change: Callable[[], None] | None = None,
        on_reading: Callable[[float, float], None] | None = None,
    ) -> None:
        """`on_reading` is called with each observation: seconds, tokens."""
        self._on_reading = on_reading
        self.on_change = on_change  # called when a prompt was read, or a sequence has ended
        self.num_sequences = 0  # of this router, in flight at the worker
        self.num_generating = 0  # of them, those with more than a short answer
        self.num_everywhere = 0  # of them, those under adapters that act on all positions
        self.num_at_engine = 0  # of them, those whose prompt its engine has or has read
        self.prompt_tokens = 0  # of this router's prompts that the worker has not finished reading
        self.placed_kv_tokens = 0  # that this router's sequences may come to occupy
        self.reported_kv_tokens = 0  # that are occupied, by all routers' sequences
        self.max_kv_tokens = 0  # 0: not reported
        self.reported_progress = 0
        self.queues = NO_QUEUES  # as reported
        self.progressed_at = 0.0  # when its agent last reported that the engine works, by the loads' clock
        self.reported_reading = ReportedReading()
        self.spent = Spent()  # as reported
        self.reported_steps = ReportedSteps()
        self.revisions: dict[str, int] = {}  # revision id -> this router's sequences that use it
        self.on_idle: Callable[[], None] | None = None  # called when no sequence is left
        self.s_per_token = 1 / _INITIAL_TOKENS_PER_S  # while it has prompts to read
        self.is_assumed = True  # that, since no worker of the fleet has been seen to read
        self.queue_s = 0.0  # expected until it has read `prompt_tokens`
        self.num_routers = 1  # that place requests there, this one included
        self.others_tokens = 0.0  # of other routers' prompts that the worker has not read: an estimate
        self.unread_tokens = 0.0  # both together
        self.wait_s = 0.0  # expected until it has read them; kept, since placement reads every worker's
        self._mean_prompt_tokens = 0.0  # of this router's
        self._num_prompts = 0  # that `prompt_tokens` counts
        self._num_reading = 0  # of these, those that the engine has
        self._busy_since = 0.0
        self._own_rate = ReadingRate()
        self._seen_at = 0.0
        self._fleets_s_per_token = self.s_per_token

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that the worker reads in a second while it has prompts to read."""
        return 1 / self.s_per_token

    @property
    def all_generating(self) -> int:
        """Sequences of all routers, if they place as many as this one, that have more than a short answer."""
        return self.num_generating * self.num_routers

    @property
    def used_kv_tokens(self) -> int:
        """KV tokens in use or promised, whichever are more.

        Reports lag; promises ignore other routers and the prefix cache.
        """
        return max(self.reported_kv_tokens, self.placed_kv_tokens)

    def report(
        self,
        now: float,
        *,
        used_kv_tokens: int,
        max_kv_tokens: int,
        progress: int = 0,
        queues: Queues = NO_QUEUES,
        num_routers: int = 1,
        num_unread: int = 0,
        read_tokens: int = 0,
        spent: Spent = Spent(),
    ) -> None:
        """Take over an engine's report. A changed KV use counts as progress.

        Unread prompts that this router has not sent are other routers', and are taken to be as long as this router's.
        `read_tokens`, without those of the prefix cache, and `spent` are counts since the engine's start.
        """
        if (progress, used_kv_tokens) != (self.reported_progress, self.reported_kv_tokens):
            self.reported_progress, self.progressed_at = progress, now
        self.reported_kv_tokens, self.max_kv_tokens, self.queues = used_kv_tokens, max_kv_tokens, queues
        self.num_routers = min(max(1, num_routers), _MAX_ROUTERS)
        # A router alone knows it all, and sooner: reports are late.
        num_others = self._num_others(num_unread, queues.requests) if self.num_routers > 1 else 0
        self.others_tokens = _OTHERS_WEIGHT * num_others * self._mean_prompt_tokens
        self.reported_reading.report(now, read_tokens, spent.reading_us)
        self.spent = spent
        self.reported_steps.report(now, spent)
        self._estimate(now)

    def _num_others(self, num_unread: int, num_requests: int) -> float:
        """How many of an engine's unread prompts are other routers'.

        At least all but this router's, some of which may be counted as running or sent. Those are as many as among all
        requests of the engine, if all routers' prompts wait equally long.
        """
        own_share = self.num_at_engine / num_requests if num_requests else 1.0
        return max(0.0, num_unread - self._num_reading, num_unread * (1 - own_share))

    def began_reading(self, now: float) -> None:
        if not self._num_reading:
            self._busy_since = now
        self._num_reading += 1

    def ended_reading(self, now: float, tokens: int) -> None:
        """`tokens` is 0 for a prompt that was not read to its end."""
        self._num_reading -= 1
        if not tokens:  # the others' time goes on; a time with nothing read says nothing
            return
        busy_s, self._busy_since = now - self._busy_since, now
        self.observe_reading(now, busy_s, tokens)

    def observe_reading(self, now: float, busy_s: float, tokens: int) -> None:
        """Learn how fast the worker reads. `tokens` include those that it found in its prefix cache."""
        self._own_rate.fade(self._own_share(now))
        self._own_rate.observe(busy_s, tokens)
        self._seen_at = now
        self._estimate(now)
        if self._on_reading is not None:
            self._on_reading(busy_s, tokens)

    def expect_reading(self, now: float, s_per_token: float) -> None:
        """Take it for as fast as the fleet, as far as it is not known better."""
        self._fleets_s_per_token = s_per_token
        self._estimate(now)

    def _own_share(self, now: float) -> float:
        """Of the weight of what was seen, that is left. It stays while the worker reads."""
        return 1.0 if self._num_reading else 0.5 ** ((now - self._seen_at) / _HALF_LIFE_S)

    def _estimate(self, now: float) -> None:
        share = self._own_share(now)
        fleets = self._fleets_s_per_token
        own = self._own_rate.blended(_FLEETS_BUSY_S, fleets, share)
        self.s_per_token = fleets if abs(own - fleets) <= _ALIKE * fleets else own
        self._count()

    def left_s(self, now: float) -> float:
        """`queue_s`, without the part of the prompt it is reading that it should have read by now."""
        if not self._num_reading:
            return self.queue_s
        return max(self.queue_s - (now - self._busy_since), self.queue_s * (1 - 1 / self._num_prompts))

    def add_prompt(self, tokens: int) -> None:
        """Count a prompt that the worker is to read; a negative number for one that it has read."""
        self.prompt_tokens += tokens
        self._num_prompts += 1 if tokens > 0 else -1
        if tokens > 0:
            mean = self._mean_prompt_tokens or tokens
            self._mean_prompt_tokens = mean + _WEIGHT_OF_NEWEST * (tokens - mean)
        self._count()

    def _count(self) -> None:
        self.unread_tokens = self.prompt_tokens + self.others_tokens
        self.queue_s = self.prompt_tokens * self.s_per_token
        self.wait_s = self.unread_tokens * self.s_per_token


class WorkerLoads(Mapping[str, WorkerLoad]):
    """The loads by worker name. An unknown worker has no load.

    A worker that this router has not lately seen read is taken for as fast as the others: were it thought slower, no
    prompt would go there while others are idle, and it would not be seen again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._fleets_rate = ReadingRate(_INITIAL_BUSY_S, _INITIAL_TOKENS_PER_S * _INITIAL_BUSY_S)
        self._expected = self._fleets_rate.s_per_token  # as the workers have it
        self._is_assumed = True
        self.clock = clock
        self.on_change: Callable[[], None] | None = None  # of each load; set it before there are any

    def __getitem__(self, worker: str) -> WorkerLoad:
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = WorkerLoad(self.on_change, self._observed)
            load.is_assumed = self._is_assumed
            load.expect_reading(self.clock(), self._expected)
        return load

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    def forget(self, worker: str, on_idle: Callable[[], None] = lambda: None) -> WorkerLoad:
        """Drop a worker that has left, and return its load. One that comes back under its name gets a new load.

        `on_idle` is called once the last sequence held there has ended; immediately if there is none.
        """
        load = self._loads.pop(worker, None) or WorkerLoad()
        if load.num_sequences:
            load.on_idle = on_idle
        else:
            on_idle()
        return load

    def _observed(self, busy_s: float, tokens: float) -> None:
        if self._is_assumed:
            self._is_assumed = False
            for load in self._loads.values():
                load.is_assumed = False
        # One that is compiling kernels must not make all others look slow.
        self._fleets_rate.fade(_REMEMBERED)
        self._fleets_rate.observe(min(busy_s, _LONGEST * self._expected * tokens), tokens)
        s_per_token = self._fleets_rate.s_per_token
        if abs(s_per_token - self._expected) > _NEWS * self._expected:
            self._expected, now = s_per_token, self.clock()
            for load in self._loads.values():
                load.expect_reading(now, s_per_token)

    def add(
        self,
        worker: str,
        *,
        prompt_tokens: int = 0,
        kv_tokens: int = 0,
        revision_id: str | None = None,
        is_everywhere: bool = False,
    ) -> InFlightLoad:
        """Count one more sequence at a worker until it is released."""
        return InFlightLoad(self[worker], self.clock, prompt_tokens, kv_tokens, revision_id, is_everywhere)


@dataclass(slots=True, eq=False)
class InFlightLoad:
    """One sequence counted at one worker."""

    _load: WorkerLoad
    _clock: Callable[[], float]
    _prompt_tokens: int
    _kv_tokens: int
    _revision_id: str | None
    _is_everywhere: bool
    _is_generating: bool = field(init=False)
    _is_held: bool = True
    _is_reading: bool = False
    _is_at_engine: bool = False
    is_seen: bool = True  # False: no answer shows when the prompt was read: the time of `read_ended` says nothing

    def __post_init__(self) -> None:
        load = self._load
        self._is_generating = self._kv_tokens - self._prompt_tokens > _SHORT_ANSWER_TOKENS
        load.num_sequences += 1
        load.num_generating += self._is_generating
        load.num_everywhere += self._is_everywhere
        if self._prompt_tokens:
            load.add_prompt(self._prompt_tokens)
        load.placed_kv_tokens += self._kv_tokens
        if self._revision_id is not None:
            load.revisions[self._revision_id] = load.revisions.get(self._revision_id, 0) + 1

    def read_begins(self) -> None:
        """The engine has the prompt."""
        if self._prompt_tokens and not self._is_reading:
            self._is_reading = True
            self._load.began_reading(self._clock())
            if not self._is_at_engine:
                self._is_at_engine = True
                self._load.num_at_engine += 1

    def learn_read(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn from an answer's counts, where `read_ended` does not. The engine's reports say how fast it reads."""
        s_per_token = self._load.reported_reading.s_per_token
        if not self.is_seen and s_per_token:
            busy_s = (prompt_tokens - cached_tokens) * s_per_token
            self._load.observe_reading(self._clock(), busy_s, prompt_tokens)

    def read_ended(self, *, was_read: bool = True) -> None:
        """The engine has read the prompt, or given it up. Idempotent."""
        if not self._prompt_tokens:
            return
        if self._is_reading:
            self._is_reading = False
            self._load.ended_reading(self._clock(), self._prompt_tokens if was_read and self.is_seen else 0)
        if self._prompt_tokens:
            self._load.add_prompt(-self._prompt_tokens)
            self._prompt_tokens = 0
            if self._load.on_change is not None and self._is_held:
                self._load.on_change()

    @property
    def expected_read_s(self) -> float:
        """Expected seconds until the worker has read this prompt and those before it. It may have left by now."""
        return self._load.wait_s

    def release(self) -> None:
        """End the count. Idempotent, because several paths notice the end of a sequence."""
        if not self._is_held:
            return
        self._is_held = False
        self.read_ended(was_read=False)
        load = self._load
        load.num_sequences -= 1
        load.num_generating -= self._is_generating
        load.num_everywhere -= self._is_everywhere
        load.num_at_engine -= self._is_at_engine
        load.placed_kv_tokens -= self._kv_tokens
        if self._revision_id is not None:
            left = load.revisions[self._revision_id] - 1
            if left:
                load.revisions[self._revision_id] = left
            else:
                del load.revisions[self._revision_id]
        if load.on_change is not None:
            load.on_change()
        if load.on_idle is not None and not load.num_sequences:
            load.on_idle()
