"""A workload: sessions by number, so that several processes generate the same stream independently."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Self

from bench.workloads.conversations import chat
from bench.workloads.draws import Draws
from bench.workloads.lengths import FixedLengths, Lengths
from bench.workloads.popularity import Pick, Popularity
from bench.workloads.session import COMPLETIONS, Request, Session, canonical_bytes

LORA_RANK = 16  # where a source has none
_FIRST_TOKEN = 16  # smaller ids are often special tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A named workload and what it does unless the command line says otherwise."""

    name: str
    text: str
    source: str
    lengths: Lengths = field(default_factory=lambda: FixedLengths(1024, 128))
    is_chat: bool = False  # conversations, in place of requests with `lengths`
    popularity: Popularity = field(default_factory=Popularity)
    num_requests: int = 1000
    num_adapters: int = 0  # 0: the base model, unless adapters are named
    concurrency: int | None = None  # closed loop, if neither this nor a rate is asked for
    requests_per_s: float | None = None  # open loop, likewise
    turns: float = 1.0  # requests per session, on average
    warm_up: int = 0  # requests of the same shape, discarded
    vocabulary: int = 500  # token ids of prompts are below it
    lora_rank: int = LORA_RANK  # of its adapters, where a benchmark makes them
    all_share: float = 0.0  # of its adapters, likewise: act at all positions, not only while the prompt is read
    scale: float = 1.0  # of a conversation's words and tokens; `lengths` have theirs in them

    @property
    def label(self) -> str:
        """Its name with its number of adapters, as results of a matrix show it."""
        return f"{self.name}, n = {self.num_adapters}"

    def is_for_all_positions(self, number: int) -> bool:
        """Whether this adapter acts at all positions: `all_share` of them do, evenly spread."""
        num_all = round(self.num_adapters * self.all_share)
        return (number + 1) * num_all // self.num_adapters > number * num_all // self.num_adapters

    def scaled(self, factor: float) -> Self:
        """An edition with shorter or longer prompts and answers. The number of requests and their pace stay."""
        return replace(self, lengths=self.lengths.scaled(factor), scale=self.scale * factor)


class Stream:
    """The sessions of a workload under one seed."""

    def __init__(self, workload: Workload, seed: int, num_adapters: int) -> None:
        """Raises BenchError."""
        self.workload = workload
        self._seed = seed
        self._pick: Pick | None = workload.popularity.picker(num_adapters, seed) if num_adapters else None

    def session(self, number: int) -> Session:
        """The session with this number, from 0."""
        workload, adapter = self.workload, self.adapter(number)
        if workload.is_chat:
            return Session(number, adapter, tuple(chat(self._seed, number, adapter, workload.scale)))
        prompt, output = workload.lengths.of(self._seed, number)
        return Session(number, adapter, (self.completion(number, prompt, output),))

    def adapter(self, number: int) -> int | None:
        """The adapter of a session; None: the base model."""
        return self._pick(number) if self._pick else None

    def completion(self, number: int, prompt_tokens: int, output_tokens: int) -> Request:
        """A request with random token ids, which no other request shares."""
        ids = Draws(self._seed, "prompt", number).tokens(prompt_tokens, _FIRST_TOKEN, self.workload.vocabulary - 1)
        return Request(COMPLETIONS, {"prompt": ids}, output_tokens, prompt_tokens=prompt_tokens)

    def sessions(self, num_requests: int | None, first: int = 0, step: int = 1) -> Iterator[Session]:
        """Sessions until there are so many requests; the last session may be cut short. None: without end.

        Of them, every `step`-th from number `first` on. The others are not made, unless it takes them to count.
        """
        if num_requests is None:
            return map(self.session, count(first, step))
        if not self.workload.is_chat:
            return map(self.session, range(first, num_requests, step))
        return islice(self._until(num_requests), first, None, step)

    def _until(self, num_requests: int) -> Iterator[Session]:
        left, number = num_requests, 0
        while left > 0:
            session = self.session(number)
            if len(session.requests) > left:
                session = Session(session.number, session.adapter, session.requests[:left])
            yield session
            number += 1
            left -= len(session.requests)

    def digest(self, num_requests: int) -> str:
        """SHA-256 over the canonical bytes of the first requests."""
        digest = hashlib.sha256()
        for session in self.sessions(num_requests):
            digest.update(canonical_bytes(session))
        return digest.hexdigest()
