"""A validated request becomes an answer: one `SequenceRun` per sequence, their outputs merged."""

from __future__ import annotations

import asyncio
import re

from router.generation.backends import Backends
from router.generation.client_answer import ClientAnswer
from router.generation.request_state import RequestState
from router.generation.sequence_run import GenerationRequest, SequenceRun
from router.protocol.choices import ChoiceStreams, merged_answer
from router.protocol.sse import Signature
from router.protocol.validation import Sequence, ValidatedRequest
from router.revisions.resolve import Target

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Generation:
    """One request on its way through the workers."""

    def __init__(
        self,
        backends: Backends,
        validated: ValidatedRequest,
        target: Target,
        request: RequestState,
        client: ClientAnswer,
        signature: Signature,
    ) -> None:
        self._backends = backends
        self._admitted = validated
        self._request = request
        self._client = client
        self._signature = signature
        self._wanted = GenerationRequest(validated, target.revision)
        self._answer_id = f"{validated.endpoint.id_prefix}{request.request_id}"  # where there are several sequences

    async def run(self) -> None:
        """Answer the client. Raises RouterError with nothing sent, or with a stream half sent."""
        if not self._admitted.is_streaming:
            await self._answer()
        elif self._admitted.num_choices == 1:
            await self._stream_one()
        else:
            await self._stream_several()

    async def _answer(self) -> None:
        sequences = list(self._admitted.sequences())
        if len(sequences) == 1:
            answer = await self._answer_to(sequences[0])
        else:
            tasks = await _together([self._answer_to(sequence) for sequence in sequences])
            answer = merged_answer(tasks, answer_id=self._answer_id, num_per_prompt=self._admitted.num_per_prompt)
        if count := _COMPLETION_TOKENS.search(answer):
            self._request.num_completion_tokens = int(count[1])
        await self._client.whole(200, self._signature.on_answer(answer), {"content-type": "application/json"})

    async def _answer_to(self, sequence: Sequence) -> bytes:
        async with self._sequence_run(sequence) as run:
            return await run.answer()

    async def _stream_one(self) -> None:
        """The path that most tokens take: nothing here looks into an event."""
        client, signature = self._client, self._signature

        async def write(events: bytes) -> None:
            await client.write(signature.on_events(events))

        async with self._sequence_run(next(self._admitted.sequences())) as run:
            first = await run.begin()
            await run.relay(first, write)
            await client.end_stream()

    async def _stream_several(self) -> None:
        """The answer begins with the first sequence that begins; one that fails after that ends them all."""
        streams = ChoiceStreams(
            answer_id=self._answer_id,
            num_per_prompt=self._admitted.num_per_prompt,
            includes_usage=self._admitted.includes_usage,
        )

        async def stream(sequence: Sequence) -> None:
            async def write(events: bytes) -> None:
                if merged := streams.events(sequence.index, events):
                    await self._client.write(self._signature.on_events(merged))

            async with self._sequence_run(sequence) as run:
                first = await run.begin()
                await run.relay(first, write)

        await _together([stream(sequence) for sequence in self._admitted.sequences()])
        await self._client.end_stream(self._signature.on_events(streams.end()))

    def _sequence_run(self, sequence: Sequence) -> SequenceRun:
        return SequenceRun(self._backends, self._wanted, sequence, self._request)


async def _together(coroutines: list) -> list:
    """All results in order; the first failure stops the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
