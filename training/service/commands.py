"""Commands between the log, the executor and the clients that wait for them."""

import asyncio
import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from training.executor.executor import Command, Executor, ExecutorOptions, folder_of
from training.executor.operations import (
    Done,
    Export,
    Failure,
    Load,
    Operation,
    Outcome,
    Pass,
    Save,
    Scored,
    Spec,
    Step,
    encode,
)
from training.executor.turns import Turns
from training.runs.base import LoadedBase
from training.service.data.answers import EarlierPasses
from training.service.errors import Busy, Gone, NotKnown, Refused, ServiceError
from training.service.identity import Caller
from training.service.journal import Checkpoint, Journal, Model, Record
from training.service.metrics import TrainerMetrics
from training.trainable.packed import ServedWeights

_MAX_AHEAD = 4096  # commands of a model after the one that is computed
_MAX_LOGGED_BYTES = 512 * 1024**2  # of a model's commands that a start would compute again
_LATE_AFTER_S = 600.0  # the SDK tries for 300 s
_DISK_S = 5.0  # until a log that cannot be written is tried again

Exported = Callable[[Model, int, Export, ServedWeights], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LiveModel:
    """What is known of a model beside the log."""

    model: Model
    num_bytes: int  # of its commands that a start would compute again
    earlier: EarlierPasses = field(default_factory=EarlierPasses)
    making: dict[int, str] = field(default_factory=dict)  # paths of checkpoints to come, by the command's number
    waiting: dict[int, asyncio.Event] = field(default_factory=dict)  # for outcomes, by the command's number
    keys: dict[int, str | None] = field(default_factory=dict, repr=False)  # of who sent it, by the command's number
    has_asked: asyncio.Event = field(default_factory=asyncio.Event)  # a new one for the next who asks
    accepting: asyncio.Lock = field(default_factory=asyncio.Lock)
    accepted_s: dict[int, float] = field(default_factory=dict)  # when, by the clock of metrics; not after a restart
    begun_s: float = 0.0  # when the present command was
    present: tuple[int, Operation | None] = (-1, None)  # it and its number: passes are large, and read once
    steps: int = 0  # that were done
    tokens: int = 0  # of passes
    loss: float | None = None  # of the last pass with a gradient, by token of its answers

    def count(self, operation: Operation | None, outcome: Outcome) -> None:
        """A command that is computed, also again after a start."""
        self.steps += isinstance(operation, Step) and isinstance(outcome, Done)
        if isinstance(operation, Pass) and isinstance(outcome, Scored) and not operation.forward_only:
            self.loss = outcome.loss_sum / max(operation.num_answer_tokens, 1)
        self.tokens += operation.num_tokens if isinstance(operation, Pass) and isinstance(outcome, Scored) else 0

    def note(self, seq: int, operation: Operation) -> None:
        self.earlier.note(seq, operation)
        if isinstance(operation, Save | Export) and operation.path is not None:
            self.making[seq] = operation.path

    def note_asker(self, seq: int, key: str | None) -> None:
        """After a start, the sender of a command is taken to be who asks for its outcome first."""
        self.keys.setdefault(seq, key)
        self.has_asked.set()
        self.has_asked = asyncio.Event()


def checkpoint_of(
    model: Model, saved: Save | Export, path: str, adapter: str | None = None, scores_prompts: bool = False
) -> Checkpoint:
    folder = saved.folder if isinstance(saved, Save) else ""
    facts = model.tenant, model.spec, folder, adapter, time.time(), saved.expires_s, model.metadata
    return Checkpoint(path, *facts, scores_prompts)


class Commands:
    """Of all models. Methods run in the event loop; those that executors call, in their threads."""

    def __init__(
        self,
        journal: Journal,
        base: LoadedBase,
        base_name: str,
        folder: Path,
        options: ExecutorOptions,
        turns: Turns,
        metrics: TrainerMetrics,
    ) -> None:
        self.journal, self._folder, self.metrics = journal, folder, metrics
        self.models: dict[str, LiveModel] = {}
        self.executor = Executor(base, base_name, folder, self, options, turns)
        self._late: dict[tuple[str, int], float] = {}  # missed numbers, and when that was noticed
        self._stopping = threading.Event()

    def start(self, publish: Exported) -> None:
        """Go on where the last process ended. `publish` is called in the event loop for each export."""
        self._loop, self._publish = asyncio.get_running_loop(), publish
        for model in self.journal.all(Model):
            self._add_model(model)
        kept = set(map(folder_of, self.models))
        for found in self._folder.glob("snapshots/[!.]*"):
            if found.name not in kept:  # the process ended before it had removed it
                shutil.rmtree(found, ignore_errors=True)
        self.delete_strays()
        self.executor.start()

    def delete_strays(self) -> None:
        """Folders of checkpoints that no record names, as of a model that was removed while it saved the first one."""
        found = list(self._folder.glob("checkpoints/*"))  # first: what is saved from now on is not among them
        kept = set(map(folder_of, self.executor.tenants))
        kept |= {Path(each.folder).parent.name for each in self.journal.all(Checkpoint)}
        for folder in found:
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.to_thread(self.executor.stop)

    # Models

    async def create(self, model: Model, first: Operation) -> None:
        """Write the model and its first command."""
        await asyncio.to_thread(self.journal.add_model, model, first)
        self._add_model(model)

    def _add_model(self, model: Model) -> None:
        live = self.models[model.id] = LiveModel(
            model, self.journal.num_bytes(model.id), steps=model.steps, tokens=model.tokens
        )
        for seq, task in self.journal.operations(model):
            live.note(seq, task)
        self.executor.add_model(
            model.id, model.tenant, model.spec, self.journal.seqs(model.id), next_seq=model.snapshot + 1
        )

    async def remove(self, model: str) -> None:
        async with self.models[model].accepting:  # the log gets no command of a model that is gone
            del self.models[model]
            try:
                await asyncio.to_thread(self.journal.remove_model, model)
            finally:
                self.executor.remove_model(model)  # the last that has it, so that its id is free (`Models.create`)

    def model(self, tenant: str, model: str) -> LiveModel:
        """Raises NotKnown."""
        if (found := self.models.get(model)) is None or found.model.tenant != tenant:
            raise NotKnown(f"there is no model {model[:80]!r}; its session may have ended")
        return found

    # Commands

    async def accept(
        self,
        live: LiveModel,
        seq: int,
        make: Callable[[], Operation],
        *,
        key: str | None = None,
        is_of_gradient: bool = False,
    ) -> str:
        """Log a command, and return its id. What is wrong with it fails its future: a client skips no number.

        A number that is known is a retry, whatever its body: it gets the same id. `key`: the caller's, for an export.
        Raises NotKnown, Refused and Busy.
        """
        model, operation, refusal = live.model.id, None, None
        async with live.accepting:
            self.model(live.model.tenant, model)  # not removed meanwhile
            next_seq = self.executor.next_of(model)
            if not 1 <= seq <= next_seq + _MAX_AHEAD:
                raise Refused(f"seq_id is {seq}; command {next_seq} is next, and {_MAX_AHEAD} may wait")
            if seq < next_seq:
                return f"{model}#{seq}"
            is_full = live.num_bytes > _MAX_LOGGED_BYTES
            if is_full and seq != next_seq and not self.executor.is_idle(model):  # the next one is what others wait for
                raise Busy(f"{model} has {live.num_bytes} bytes of commands in the log; wait for some")
            try:
                operation = await asyncio.to_thread(make)
                if is_full and isinstance(operation, Pass):
                    raise Refused(f"there are over {_MAX_LOGGED_BYTES} bytes of passes without a step; send optim_step")
            except ServiceError as error:
                operation, refusal = None, Failure(str(error))
            raw = None if operation is None else encode(operation)
            if await asyncio.to_thread(self.journal.add, model, seq, raw, refusal, is_of_gradient):
                if operation is not None:
                    live.note(seq, operation)
                    live.accepted_s[seq] = time.monotonic()
                    if isinstance(operation, Export):
                        live.keys[seq] = key
                elif refusal is not None:
                    self.metrics.finished(None, refusal, None)
                live.num_bytes += len(raw or b"")
                self.executor.add(model, seq)
        return f"{model}#{seq}"

    async def key_of(self, model: str, seq: int) -> str | None:
        """The key of who sent a command. After a start, waits until somebody asks for its outcome."""
        live = self.models[model]
        while seq not in live.keys:
            await live.has_asked.wait()
        return live.keys[seq]

    async def outcome(self, caller: Caller, request_id: str, within_s: float) -> Outcome | None:
        """None: there is none yet. Raises NotKnown and Gone."""
        name, _, seq = request_id.rpartition("#")
        live = self.model(caller.tenant, name)
        if not seq.isdecimal() or len(seq) > 10:
            raise NotKnown(f"there is no future {request_id[:80]!r}")
        number = int(seq)
        try:
            async with asyncio.timeout(within_s):
                while True:
                    finished = live.waiting.setdefault(number, asyncio.Event())
                    if (found := await asyncio.to_thread(self.journal.outcome, name, number)) is not None:
                        self._wake(live, number)
                        return found
                    live.note_asker(number, caller.key)
                    await finished.wait()
        except TimeoutError:
            return None
        except LookupError:
            if (asked := live.waiting.pop(number, None)) is not None:
                asked.set()
            raise Gone(f"{request_id[:80]!r} is not known any more") from None

    async def fill_gaps(self, now_s: float) -> None:
        """Fail the commands that have been missing for long, so that those behind them go on."""
        gaps = self.executor.gaps()
        missed = {(model, first): self._late.get((model, first), now_s) for model, (first, _) in gaps.items()}
        self._late = missed
        for (model, first), since_s in missed.items():
            if now_s - since_s >= _LATE_AFTER_S:
                for seq in range(first, gaps[model][1]):
                    failure = Failure(f"command {seq} has not arrived within {_LATE_AFTER_S:g} s")
                    await asyncio.to_thread(self.journal.add, model, seq, None, failure, True)
                    self.executor.add(model, seq)

    # The executor's thread

    def command(self, model: str, seq: int) -> Command:
        found, live, now_s = self.journal.command(model, seq), self.models.get(model), time.monotonic()
        if live is not None:
            live.begun_s, live.present = now_s, (seq, found.operation)
            if (accepted_s := live.accepted_s.pop(seq, None)) is not None:
                self.metrics.queue_seconds.observe(now_s - accepted_s)
            if found.outcome is not None:
                live.count(found.operation, found.outcome)
        if found.operation is not None and found.outcome is not None:
            self.metrics.replays.inc()
        return found

    def finish(self, model: str, seq: int, outcome: Outcome, made: Record | None = None) -> None:
        """Log the outcome, with what the client is told of it, and wake those that wait."""
        if (live := self.models.get(model)) is None:  # removed meanwhile
            return
        number, operation = live.present
        if number != seq:  # an export, whose push has ended while others were computed
            operation = self.journal.command(model, seq).operation
        if isinstance(outcome, Done):
            match operation:
                case Spec():
                    outcome = Done({"model_id": model})
                case Load(path=path):
                    outcome = Done({"path": path, "model_id": model})
                case Step():
                    outcome = Done({"metrics": outcome.values})
                case Save() as saved:
                    outcome = Done({"path": saved.path})
                    made = checkpoint_of(live.model, saved, saved.path)
        live.count(operation, outcome)
        is_export = isinstance(operation, Export)  # whose push ends it
        self.metrics.finished(operation, outcome, None if is_export else time.monotonic() - live.begun_s)
        self.log(partial(self.journal.finish, model, seq, outcome, made))
        self._loop.call_soon_threadsafe(self._wake, live, seq)

    def log(self, write: Callable[[], None]) -> None:
        """While the disk is full it waits: what was computed is not lost."""
        while True:
            try:
                return write()
            except sqlite3.OperationalError as error:
                log.error("the log cannot be written", extra={"fields": {"error": str(error)}})
                if self._stopping.wait(_DISK_S):
                    raise

    def _wake(self, live: LiveModel, seq: int) -> None:
        live.making.pop(seq, None)
        live.keys.pop(seq, None)
        if (finished := live.waiting.pop(seq, None)) is not None:
            finished.set()

    def exported(self, model: str, seq: int, operation: Export, weights: ServedWeights) -> None:
        if (live := self.models.get(model)) is not None:
            self._loop.call_soon_threadsafe(self._publish, live.model, seq, operation, weights)

    def published(self, model: str, seq: int, outcome: Outcome, made: Record | None = None) -> None:
        """Finish a command whose weights are published, or cannot be."""
        self.finish(model, seq, outcome, made)
        self.executor.published(model)

    def forget(self, model: str, seq: int) -> None:
        if (live := self.models.get(model)) is not None:
            try:
                self.journal.forget(replace(live.model, snapshot=seq, steps=live.steps, tokens=live.tokens))
            except sqlite3.OperationalError as error:  # as of a full disk: the log has more than is needed
                log.warning("nothing is forgotten", extra={"fields": {"model": model, "error": str(error)}})
            live.num_bytes = self.journal.num_bytes(model)
