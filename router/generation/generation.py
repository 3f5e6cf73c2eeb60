"""Answers a validated request: runs one `SequenceRun` per sequence and merges their outputs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from router.generation.backends import Backends
from router.generation.client_answer import ClientAnswer
from router.generation.request_state import RequestState
from router.generation.sequence_run import GenerationRequest, SequenceRun
from router.identity.principal import Principal
from router.protocol.choices import ChoiceStreams, merged_answer
from router.protocol.validation import Sequence, ValidatedRequest
from router.revisions.resolve import Target

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Wording(Protocol):
    """Converts an engine's answer to the client's: a `Signature`, or the translation of another API."""

    @property
    def may_drop_events(self) -> bool: ...  # `on_events` may give nothing

    def on_events(self, events: bytes) -> bytes: ...
    def on_answer(self, answer: bytes) -> bytes: ...


class Generation:
    """The generation of one answer."""

    def __init__(
        self,
        backends: Backends,
        validated: ValidatedRequest,
        target: Target,
        request: RequestState,
        client: ClientAnswer,
        wording: Wording,
        namespace: str,
        principal: Principal,
    ) -> None:
        self._backends = backends
        self._validated = validated
        self._request = request
        self._client = client
        self._wording = wording
        generation_request = GenerationRequest(validated, target.revision, namespace, principal.tenant)
        self._sequence_run = partial(SequenceRun, backends, generation_request, request=request)
        self._confined_to = principal.confined_to
        self._answer_id = (
            f"{validated.endpoint.id_prefix}{request.request_id}"  # of an answer that several sequences share
        )

    async def run(self) -> None:
        """Answer the client. Raises RouterError, before anything is sent or in the middle of a stream."""
        validated, backends = self._validated, self._backends
        legs = 2 if validated.generates and backends.fleet.state.decodes else 1
        num_sequences = validated.num_choices
        room, num_connections = backends.engines.room, legs * num_sequences
        room.take(self._confined_to, num_connections)
        try:
            if not validated.is_streaming:
                await self._answer_whole()
            else:
                await (self._stream_one() if num_sequences == 1 else self._stream_several())
        finally:  # also of a client that leaves in between
            room.give_back(self._confined_to, num_connections)
            if validated.is_streaming:
                self._request.sum_usages()

    async def _answer_whole(self) -> None:
        validated, wanted = self._validated, self._validated.wanted
        if wanted is not None:
            taken = await _gather(self._sequence_answer, list(validated.sequences()))
            answer = wanted.merged(taken, answer_id=self._answer_id, model=self._backends.model)
        elif validated.num_choices == 1:
            async with self._sequence_run(next(validated.sequences())) as run:
                answer = await run.answer()
        else:
            answers = await _gather(self._sequence_answer, list(validated.sequences()))
            answer = await merged_answer(answers, answer_id=self._answer_id, num_per_prompt=validated.num_per_prompt)
        if count := _COMPLETION_TOKENS.search(answer):
            self._request.num_completion_tokens = int(count[1])
        if count := _PROMPT_TOKENS.search(answer):
            self._request.num_prompt_tokens = int(count[1])
        await self._client.whole(200, self._wording.on_answer(answer), {"content-type": "application/json"})

    async def _sequence_answer(self, sequence: Sequence) -> bytes:
        async with self._sequence_run(sequence) as run:
            return await run.answer()

    async def _stream_one(self) -> None:
        """The hot path of most tokens: it parses no event."""
        client, sign = self._client, self._wording.on_events

        write = client.sparse_writer(sign) if self._wording.may_drop_events else client.writer(sign)
        async with self._sequence_run(next(self._validated.sequences())) as run:
            first = await run.begin()
            last = await run.relay(first, write, client)
            await client.end_stream(last, sign)

    async def _stream_several(self) -> None:
        """Merge the streams of all sequences. One that fails ends them all."""
        streams = ChoiceStreams(
            answer_id=self._answer_id,
            num_per_prompt=self._validated.num_per_prompt,
            includes_usage=self._validated.includes_usage,
        )

        async def stream(sequence: Sequence) -> None:
            def write(events: bytes) -> None:
                if merged := streams.events(sequence.index, events):
                    self._client.write(self._wording.on_events(merged))

            async with self._sequence_run(sequence) as run:
                first = await run.begin()
                write(await run.relay(first, write, self._client))

        await _gather(stream, self._validated.sequences())
        await self._client.end_stream(streams.end(), self._wording.on_events)


async def _gather(run: Callable[[Sequence], Coroutine[Any, Any, Any]], sequences: Iterable[Sequence]) -> list:
    """All results in order. The first failure cancels the others and is raised without its group.

    Yields to other requests between two starts, since starting 128 at once would block the event loop for 0.1 s.
    """
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                tasks.append(group.create_task(run(sequence)))
                await asyncio.sleep(0)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
