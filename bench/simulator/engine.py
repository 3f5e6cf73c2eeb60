"""A simulated engine with SGLang's loop: batches of prompts first, else decode steps of all sequences.

It reads prompts, generates, or both. Times come from curves. A sequence has KV memory for its whole length from its
admission on, in the order of arrival; SGLang admits more, and takes some back when memory runs out.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from bench.simulator.attempt import Attempt
from bench.simulator.clock import Clock
from bench.simulator.curves import EngineTimes
from bench.simulator.decode_batch import DecodeBatch
from router.fleet.queues import Queues
from router.fleet.worker_loads import Spent

_MANY_SEQUENCES = 8  # that generate, for which prompts wait
_LOOK_AHEAD = 64  # prompts behind those whose adapters find no slot in this batch
OnAttempt = Callable[[Attempt], None]


class Engine:
    """An engine and what waits for it."""

    def __init__(
        self, times: EngineTimes, clock: Clock, on_read: OnAttempt, on_first: OnAttempt, on_end: OnAttempt
    ) -> None:
        """`on_read`: a prompt was read. `on_first`: a sequence begins to generate, its first token is known."""
        self._times, self._clock = times, clock
        self._on_read, self._on_first, self._on_end = on_read, on_first, on_end
        self._limits = times.curves.limits
        self.decode: DecodeBatch[Attempt] = DecodeBatch(times, clock, on_end)
        self.reading_s = 0.0
        self.used_kv_tokens = 0  # by those that were admitted
        self.num_admitted = 0
        self.num_awaiting_room = 0  # here, or at the decode workers of its prompts
        self.num_unread = 0  # prompts with room
        self._num_generating = 0
        self._generating_kv_tokens = 0
        self._admissions: deque[tuple[Attempt, OnAttempt]] = deque()
        self._waiting: deque[Attempt] = deque()  # prompts
        self._slots: OrderedDict[str, None] = OrderedDict()
        self._is_reading = False

    # ---- KV memory --------------------------------------------------------------------------------------------------

    def admit(self, attempt: Attempt, then: OnAttempt) -> None:
        """Call `then` once the sequence has room here, after all that asked before."""
        self._admissions.append((attempt, then))
        self._admit()

    def queues(self, role: str) -> Queues:
        """What its agent reports."""
        if role == "prefill":
            return Queues(self.num_awaiting_room + self.num_unread, self.num_awaiting_room)
        if role == "unified":
            return Queues(queued=self.num_awaiting_room + self.num_unread)
        return Queues(
            self.num_awaiting_room + self.num_admitted,
            self.num_awaiting_room,
            self.num_admitted - self._num_generating,
            self._limits.max_running,
            self._generating_kv_tokens,
        )

    @property
    def spent(self) -> Spent:
        """As its agent reports it."""
        return Spent(round(self.reading_s * 1e6), int(self.decode.num_steps), round(self.decode.busy_s * 1e6))

    def release(self, attempt: Attempt) -> None:
        """Its answer has ended: its room is free."""
        self._num_generating -= 1
        self._generating_kv_tokens -= attempt.kv_tokens
        self.used_kv_tokens -= attempt.kv_tokens
        self.num_admitted -= 1
        self._admit()

    def _admit(self) -> None:
        admissions, limits = self._admissions, self._limits
        while admissions:
            attempt, then = admissions[0]
            kv_tokens = attempt.kv_tokens
            is_full = self.used_kv_tokens + kv_tokens > limits.max_kv_tokens or self.num_admitted >= limits.max_running
            if is_full and self.num_admitted:  # one that never fits is served alone
                return
            admissions.popleft()
            self.used_kv_tokens += kv_tokens
            self.num_admitted += 1
            then(attempt)

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def read(self, attempt: Attempt) -> None:
        self._waiting.append(attempt)
        if not self._is_reading:
            self._is_reading = True
            self._after_step(self._read_batch)

    def _after_step(self, event: Callable[[], None]) -> None:
        wait_s = self.decode.until_boundary_s()
        if wait_s > 0:
            self._clock.after(wait_s, event)
        else:
            event()

    def _read_batch(self) -> None:
        found = self._batch()
        if found is None:
            self._is_reading = False
            self.decode.resume()
            return
        finished, seconds = found
        self.decode.pause()
        self.reading_s += seconds
        self._clock.after(seconds, self._batch_read, finished)

    def _batch(self) -> tuple[list[Attempt], float] | None:
        """Take prompts, or a part of one, from the queue: those whose last token is read, and the batch's seconds."""
        limits, waiting, slots = self._limits, self._waiting, self._slots
        finished: list[Attempt] = []
        skipped: list[Attempt] = []
        in_use: set[str] = set()
        budget = limits.chunk_tokens
        num_prompts, num_fills, num_adapted, pairs = 0, 0, 0, 0.0
        unfinished: Attempt | None = None
        while waiting and budget and len(skipped) < _LOOK_AHEAD:
            attempt = waiting.popleft()
            revision_id = attempt.revision_id
            if revision_id is not None:
                if revision_id not in in_use and len(in_use) == limits.slots:
                    skipped.append(attempt)
                    continue
                in_use.add(revision_id)
                num_fills += revision_id not in slots
                slots[revision_id] = None
                slots.move_to_end(revision_id)
                if len(slots) > limits.slots:
                    slots.popitem(last=False)
            taken = min(attempt.left_tokens, budget)
            pairs += taken * (attempt.prompt_tokens - attempt.left_tokens + taken / 2)
            attempt.left_tokens -= taken
            budget -= taken
            num_prompts += 1
            num_adapted += taken if revision_id is not None else 0
            if attempt.left_tokens:
                unfinished = attempt
            else:
                finished.append(attempt)
        waiting.extendleft(reversed(skipped))
        if unfinished is not None:
            waiting.appendleft(unfinished)
        if not num_prompts:
            return None
        tokens = limits.chunk_tokens - budget
        seconds = self._times.batch_s(tokens, num_prompts, pairs, num_adapted / tokens)
        return finished, seconds + num_fills * self._times.fill_s

    def _batch_read(self, finished: list[Attempt]) -> None:
        for attempt in finished:
            self._on_read(attempt)
        self.decode.resume()
        self._read_after(self._limits.prompts_wait_steps)

    def _read_after(self, steps: int) -> None:
        """Read the next batch after so many decode steps, at once if few sequences generate."""
        if steps and len(self.decode) >= _MANY_SEQUENCES:
            self._clock.after(self.decode.until_next_boundary_s(), self._read_after, steps - 1)
        else:
            self._after_step(self._read_batch)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def generate(self, attempt: Attempt) -> None:
        """Its KV is here, and its first token is known. It joins the others at the end of their step."""
        wait_s = self.decode.until_boundary_s()
        if wait_s > 0:
            self._clock.after(wait_s, self._join, attempt)
        else:
            self._join(attempt)

    def _join(self, attempt: Attempt) -> None:
        self._num_generating += 1
        self._generating_kv_tokens += attempt.kv_tokens
        self._on_first(attempt)
        if attempt.output_tokens > 1:
            self.decode.join(attempt, attempt.prompt_tokens + 1, attempt.output_tokens - 1)
        else:
            self._on_end(attempt)
