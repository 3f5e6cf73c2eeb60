"""The inputs and results of placement, and what it learns from requests: prompt sizes and demand.

Objects that every request creates are msgspec structs, which take a tenth of the time of frozen dataclasses to create.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from adapters.catalog.records import AdapterRevision
from adapters.identity import revision_of
from router.fleet.fleet_state import WorkerView
from router.protocol.field_values import TYPICAL_ANSWER_TOKENS, answer_limit
from router.protocol.request_body import Fields

_BLOCK_BYTES = 512
_MAX_BLOCKS = 32  # 16 KiB of a prompt
_INITIAL_BYTES_PER_TOKEN = 4.0
_WEIGHT_OF_NEWEST = 0.05
# Roughly in a template's order. Embeddings have `text` or `input_ids`.
_PROMPT_FIELDS = ("tools", "chat_template_kwargs", "messages", "prompt", "text", "input_ids")
_MAX_REVISIONS = 100_000
_DECAY_S = 10.0


class PromptSize(msgspec.Struct, frozen=True):
    """Estimates, in tokens. `blocks` are chained hashes of the prompt's beginning: equal blocks, equal prefixes."""

    prompt_tokens: int = 0
    kv_tokens: int = 0  # that the sequence may come to occupy, prompt included
    blocks: tuple[int, ...] = ()
    tokens_per_block: float = 0.0
    text_bytes: int = 0  # of JSON; 0 for token ids


_NO_SIZE = PromptSize()


class PlacementRequest(msgspec.Struct, frozen=True):
    """The properties of a request that placement may use."""

    revision_id: str | None  # also at a scale, as workers report it; None: the base model
    positions: str = "prefill"  # of the tokens that the revision acts on; "all" needs a unified worker
    is_stored: bool = True  # False: only workers that hold the revision can serve it
    needs_decode: bool = True  # False: its prompt is read and nothing is generated, so a prefill worker alone serves it
    size: PromptSize = _NO_SIZE
    demand: float = 0.0  # for this revision: workers that its recent prompts would have kept busy
    nonce: int = 0  # a random number: placement itself draws none
    namespace: str = ""  # of the prefix cache: only prompts of one namespace and revision share KV

    @classmethod
    def of(
        cls,
        revision: AdapterRevision | None,
        scaled_id: str | None = None,
        *,
        needs_decode: bool = True,
        size: PromptSize = _NO_SIZE,
        namespace: str = "",
    ) -> Self:
        if revision is None:
            return cls(None, needs_decode=needs_decode, size=size, namespace=namespace)
        positions, is_stored = revision.manifest.positions, revision.stored
        return cls(scaled_id or revision.revision_id, positions, is_stored, needs_decode, size, namespace=namespace)

    @property
    def stored_id(self) -> str | None:
        """The revision as disks have it: at no scale."""
        return self.revision_id and revision_of(self.revision_id)

    @property
    def single_roles(self) -> tuple[str, ...]:
        """The roles of workers that can serve the request alone."""
        if self.needs_decode or self.positions == "all":
            return ("unified",)
        return ("prefill", "unified")

    def can_be_read_by(self, worker: WorkerView) -> bool:
        """Whether the worker holds the revision or can fetch it, as far as the store is concerned."""
        return self.is_stored or self.revision_id is None or worker.residency.can_use_unstored(self.revision_id)


PlacementKey = tuple[str, str, str, str]


class Placement(msgspec.Struct, frozen=True):
    """A pair, whose prefill worker sends KV to its decode worker, or a single worker, which is then both.

    A single worker is a unified worker, or a prefill worker if nothing is generated.
    """

    prefill: WorkerView
    decode: WorkerView

    @property
    def is_single(self) -> bool:
        return self.prefill.name == self.decode.name

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Each worker once; the one that reads the prompt is the first."""
        return (self.prefill,) if self.is_single else (self.prefill, self.decode)

    @property
    def key(self) -> PlacementKey:
        """Identifies the two engines: a restarted engine has another incarnation, so another key."""
        return self.prefill.name, self.prefill.incarnation, self.decode.name, self.decode.incarnation

    def __str__(self) -> str:
        return ">".join(worker.name for worker in self.workers)


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """The workers and placements that have failed for one sequence so far."""

    placements: frozenset[PlacementKey] = frozenset()  # never tried again
    workers: frozenset[str] = frozenset()  # the last resort

    def with_placement(self, placement: Placement) -> Self:
        return replace(self, placements=self.placements | {placement.key})

    def with_worker(self, name: str) -> Self:
        return replace(self, workers=self.workers | {name})


class PromptMeter:
    """Estimates tokens from bytes of JSON. The ratio is corrected by engines' token counts."""

    def __init__(self) -> None:
        self._bytes_per_token = _INITIAL_BYTES_PER_TOKEN

    def estimate(self, fields: Fields, prompts: Sequence[msgspec.Raw]) -> int:
        """Estimated tokens of all prompts of a validated request: of `prompts`, or of its messages."""
        texts = [fields[name] for name in _PROMPT_FIELDS if name in fields and name != "prompt"]
        tokens = 0
        for text in (*prompts, *texts):
            view = memoryview(text)
            if view[:1] == b"[" and _is_token_ids(bytes(view[:17])):
                tokens += bytes(view).count(b",") + 1
            else:
                tokens += int(len(view) / self._bytes_per_token) + 1
        return tokens

    def measure(self, fields: Fields, *, generates: bool = True) -> PromptSize:
        """The size of one sequence of a validated request. `generates`: its prompt is not only read."""
        texts, text_bytes, ids = [], 0, None
        for name in _PROMPT_FIELDS:
            if (raw := fields.get(name)) is not None:
                texts.append(text := bytes(raw))
                text_bytes += len(text)
                if ids is None and _is_token_ids(text):
                    ids = text
        bytes_per_token = self._bytes_per_token
        if ids is not None:
            text_bytes, prompt_tokens = 0, ids.count(b",") + 1
            bytes_per_token = len(ids) / prompt_tokens
        else:
            prompt_tokens = int(text_bytes / bytes_per_token) + 1
        limit = answer_limit(fields)
        answer_tokens = (TYPICAL_ANSWER_TOKENS if limit is None else limit) if generates else 0
        blocks = _chained_hashes(texts) if text_bytes >= _BLOCK_BYTES or ids is not None else ()
        tokens_per_block = _BLOCK_BYTES / bytes_per_token
        return PromptSize(prompt_tokens, prompt_tokens + answer_tokens, blocks, tokens_per_block, text_bytes)

    def observe(self, size: PromptSize, prompt_tokens: int) -> None:
        """Learn from an engine's token count of a prompt that was measured."""
        if prompt_tokens > 0 and size.text_bytes:
            found = size.text_bytes / prompt_tokens
            self._bytes_per_token += _WEIGHT_OF_NEWEST * (min(max(found, 0.5), 64.0) - self._bytes_per_token)


def _is_token_ids(text: bytes) -> bool:
    return text[:1] == b"[" and text[1:16].lstrip()[:1].isdigit()


def _chained_hashes(texts: Sequence[bytes]) -> tuple[int, ...]:
    """One hash for each whole block of the prompt's beginning, over all bytes up to the block's end."""
    text = b"".join([each[: _BLOCK_BYTES * _MAX_BLOCKS] for each in texts])
    hashes, chained = [], 0
    for end in range(_BLOCK_BYTES, min(len(text), _BLOCK_BYTES * _MAX_BLOCKS) + 1, _BLOCK_BYTES):
        chained = hash((chained, text[end - _BLOCK_BYTES : end]))
        hashes.append(chained)
    return tuple(hashes)


class Demand:
    """Moving averages by revision. Revisions whose last request is the oldest are forgotten first."""

    def __init__(self, decay_s: float = _DECAY_S) -> None:
        self._decay_s = decay_s
        self._seconds: OrderedDict[str, tuple[float, float]] = OrderedDict()  # decayed seconds, when

    def observe(self, revision_id: str, seconds: float, now: float) -> None:
        decayed = self.seconds_per_s(revision_id, now) * self._decay_s
        self._seconds[revision_id] = decayed + seconds, now
        self._seconds.move_to_end(revision_id)
        if len(self._seconds) > _MAX_REVISIONS:
            self._seconds.popitem(last=False)

    def seconds_per_s(self, revision_id: str, now: float) -> float:
        found = self._seconds.get(revision_id)
        if found is None:
            return 0.0
        seconds, when = found
        return seconds * math.exp((when - now) / self._decay_s) / self._decay_s
