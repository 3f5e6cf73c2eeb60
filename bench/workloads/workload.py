"""A workload: sessions by number, so that several processes make the same stream without each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.errors import BenchError
from bench.workloads.conversations import agent, chat
from bench.workloads.draws import Draws
from bench.workloads.lengths import FixedLengths, Lengths
from bench.workloads.popularity import Pick, Popularity
from bench.workloads.session import COMPLETIONS, Request, Session, canonical_bytes

_FIRST_TOKEN = 16  # smaller ids are often special tokens
CONVERSATIONS: dict[str, Callable[[int, int, int | None], list[Request]]] = {"chat": chat, "agent": agent}


@dataclass(frozen=True, slots=True)
class Workload:
    """A named workload and what it does unless the command line says otherwise."""

    name: str
    text: str
    source: str
    lengths: Lengths = field(default_factory=lambda: FixedLengths(1024, 128))
    conversation: str | None = None  # a key of CONVERSATIONS, in place of `lengths`
    popularity: Popularity = field(default_factory=Popularity)
    num_requests: int = 1000
    num_adapters: int = 0  # 0: the base model, unless adapters are named
    concurrency: int | None = None  # closed loop, if neither this nor a rate is asked for
    requests_per_s: float | None = None  # open loop, likewise
    arrivals: str = "poisson"
    turns: float = 1.0  # requests per session, on average
    warm_up: int = 0  # requests of the same shape, discarded
    vocabulary: int = 500  # token ids of prompts are below it


class Stream:
    """The sessions of a workload under one seed."""

    def __init__(self, workload: Workload, seed: int, num_adapters: int, trace: tuple[Session, ...] = ()) -> None:
        if workload.vocabulary <= _FIRST_TOKEN:
            raise BenchError(f"--vocabulary {workload.vocabulary}: it must be above {_FIRST_TOKEN}")
        self.workload = workload
        self._seed = seed
        self._trace = trace
        self._pick: Pick | None = workload.popularity.picker(num_adapters, seed) if num_adapters else None

    @property
    def num_sessions(self) -> int | None:
        """How many there are; None: as many as one likes."""
        return len(self._trace) or None

    def session(self, number: int) -> Session:
        """The session with this number, from 0."""
        if self._trace:
            return self._trace[number]
        workload, adapter = self.workload, self.adapter(number)
        if workload.conversation:
            return Session(number, adapter, tuple(CONVERSATIONS[workload.conversation](self._seed, number, adapter)))
        prompt, output = workload.lengths.of(self._seed, number)
        return Session(number, adapter, (self.completion(number, prompt, output),))

    def adapter(self, number: int) -> int | None:
        """The adapter of a session; None: the base model."""
        return self._pick(number) if self._pick else None

    def completion(self, number: int, prompt_tokens: int, output_tokens: int) -> Request:
        """A request with random token ids, which no other request shares."""
        ids = Draws(self._seed, "prompt", number).tokens(prompt_tokens, _FIRST_TOKEN, self.workload.vocabulary - 1)
        return Request(COMPLETIONS, {"prompt": ids}, output_tokens, prompt_tokens=prompt_tokens)

    def sessions(self, num_requests: int | None) -> Iterator[Session]:
        """Sessions until there are so many requests; the last session may be cut short. None: without end."""
        left = num_requests
        number = 0
        while left is None or left > 0:
            if self.num_sessions is not None and number >= self.num_sessions:
                return
            session = self.session(number)
            if left is not None and len(session.requests) > left:
                session = Session(session.number, session.adapter, session.requests[:left])
            yield session
            number += 1
            left = None if left is None else left - len(session.requests)

    def digest(self, num_requests: int) -> str:
        """SHA-256 over the canonical bytes of the first requests."""
        digest = hashlib.sha256()
        for session in self.sessions(num_requests):
            digest.update(canonical_bytes(session))
        return digest.hexdigest()
