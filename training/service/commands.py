"""Commands between the log, the executor and the clients that wait for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from training.executor.executor import Command, Executor, ExecutorOptions
from training.executor.operations import Done, Export, Failure, Load, Operation, Outcome, Pass, Save, Spec, Step, encode
from training.runs.base import LoadedBase
from training.service.answers import EarlierPasses
from training.service.errors import Busy, Gone, NotKnown, Refused
from training.service.journal import Checkpoint, Journal, Model, Record

_MAX_AHEAD = 4096  # commands of a model after the one that is computed
_MAX_LOGGED_BYTES = 512 * 1024**2  # of a model's commands that a start would compute again
_LATE_AFTER_S = 600.0  # the SDK tries for 300 s

Exported = Callable[[Model, int, Export], None]


class Commands:
    """Of all models. Methods run in the event loop; those that executors call, in their threads."""

    def __init__(self, journal: Journal, base: LoadedBase, base_name: str, folder: Path, options: ExecutorOptions):
        self.journal = journal
        self.models: dict[str, Model] = {}
        self._executor = Executor(base, base_name, folder, self, options)
        self._earlier: dict[str, EarlierPasses] = {}
        self._num_bytes: dict[str, int] = {}
        self._told: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by model: some outcome is new
        self._late: dict[tuple[str, int], float] = {}  # missed numbers, and when that was noticed
        self._publish: Exported = lambda model, seq, task: None

    def start(self, publish: Exported) -> None:
        """Go on where the last process ended. `publish` is called in the event loop for each export."""
        self._loop, self._publish = asyncio.get_running_loop(), publish
        for model in self.journal.all(Model):
            self._add_model(model)
        self._executor.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.stop)

    @property
    def is_alive(self) -> bool:
        return self._executor.is_alive

    # Models

    async def create(self, model: Model, first: Operation) -> None:
        """Write the model and its first command, unless it exists."""
        if model.id not in self.models:
            await asyncio.to_thread(self.journal.add_model, model, first)
            if model.id not in self.models:  # a retry may have been faster
                self._add_model(model)

    def _add_model(self, model: Model) -> None:
        self.models[model.id] = model
        self._num_bytes[model.id] = self.journal.num_bytes(model.id)
        self._earlier[model.id] = EarlierPasses()
        for seq, task in self.journal.operations(model):
            self._earlier[model.id].note(task)
            if seq <= model.snapshot and isinstance(task, Export):  # its files are there, and it will not run again
                self._publish(model, seq, task)
        self._executor.add_model(
            model.id, model.tenant, model.spec, self.journal.seqs(model.id), next_seq=model.snapshot + 1
        )

    def is_idle(self, model: str) -> bool:
        return self._executor.is_idle(model)

    async def remove(self, model: str) -> None:
        self._executor.remove_model(model)
        for found in (self.models, self._earlier, self._num_bytes, self._told):
            found.pop(model, None)  # type: ignore[attr-defined]
        await asyncio.to_thread(self.journal.remove_model, model)

    def model(self, tenant: str, model: str) -> Model:
        """Raises NotKnown."""
        if (found := self.models.get(model)) is None or found.tenant != tenant:
            raise NotKnown(f"there is no model {model[:80]!r}; its session may have ended")
        return found

    def earlier(self, model: str) -> EarlierPasses:
        return self._earlier[model]

    # Commands

    async def accept(
        self, model: Model, seq: int, make: Callable[[], Operation], *, is_of_gradient: bool = False
    ) -> str:
        """Log a command, and return its id. What is wrong with it fails its future: a client skips no number.

        A number that is known is a retry, whatever its body: it gets the same id. Raises Refused and Busy.
        """
        next_seq = self._executor.next_of(model.id)
        if not 1 <= seq <= next_seq + _MAX_AHEAD:
            raise Refused(f"seq_id is {seq}; command {next_seq} is next, and {_MAX_AHEAD} may wait")
        request_id = f"{model.id}#{seq}"
        if seq < next_seq or await asyncio.to_thread(self.journal.has, model.id, seq):
            return request_id
        is_full = self._num_bytes[model.id] > _MAX_LOGGED_BYTES
        if is_full and seq != next_seq and not self.is_idle(model.id):  # the next one is what others wait for
            raise Busy(f"{model.id} has {self._num_bytes[model.id]} bytes of commands in the log; wait for some")
        operation: Operation | None = None
        refusal: Failure | None = None
        try:
            operation = await asyncio.to_thread(make)
            if is_full and isinstance(operation, Pass):
                raise Refused(f"there are over {_MAX_LOGGED_BYTES} bytes of passes without a step; send optim_step")
        except (Refused, NotKnown) as error:
            operation, refusal = None, Failure(str(error))
        raw = None if operation is None else encode(operation)
        is_new = await asyncio.to_thread(self.journal.add, model.id, seq, raw, refusal, is_of_gradient)
        if is_new and model.id in self.models:
            if operation is not None:
                self._earlier[model.id].note(operation)
            self._num_bytes[model.id] += len(raw or b"")
            self._executor.add(model.id, seq)
        return request_id

    async def outcome(self, tenant: str, request_id: str, within_s: float) -> Outcome | None:
        """None: there is none yet. Raises NotKnown and Gone."""
        name, _, seq = request_id.rpartition("#")
        model = self.model(tenant, name)
        if not seq.isdecimal() or len(seq) > 10:
            raise NotKnown(f"there is no future {request_id[:80]!r}")
        try:
            async with asyncio.timeout(within_s):
                while True:
                    event = self._told[model.id]
                    if (found := await asyncio.to_thread(self.journal.tell, model.id, int(seq))) is not None:
                        return found
                    await event.wait()
        except TimeoutError:
            return None
        except LookupError:
            raise Gone(f"{request_id[:80]!r} is not known any more") from None

    async def fill_gaps(self, now_s: float) -> None:
        """Fail the commands that have been missing for long, so that those behind them go on."""
        gaps = self._executor.gaps()
        missed = {(model, first): self._late.get((model, first), now_s) for model, (first, _) in gaps.items()}
        self._late = missed
        for (model, first), since_s in missed.items():
            if now_s - since_s >= _LATE_AFTER_S:
                for seq in range(first, gaps[model][1]):
                    failure = Failure(f"command {seq} has not arrived within {_LATE_AFTER_S:g} s")
                    await asyncio.to_thread(self.journal.add, model, seq, None, failure, True)
                    self._executor.add(model, seq)

    # The executor's thread

    def command(self, model: str, seq: int) -> Command:
        return self.journal.command(model, seq)

    def finish(self, model: str, seq: int, outcome: Outcome, made: Record | None = None) -> None:
        """Log the outcome, with what the client is told of it, and wake those that wait."""
        found = self.models.get(model)
        if found is None:  # removed meanwhile
            return
        if isinstance(outcome, Done):
            match self.journal.command(model, seq).operation:
                case Spec():
                    outcome = Done({"model_id": model})
                case Load(path=path):
                    outcome = Done({"path": path, "model_id": model})
                case Step():
                    outcome = Done({"metrics": outcome.values})
                case Save(path=path, folder=folder):
                    outcome = Done({"path": path})
                    made = Checkpoint(path, found.tenant, found.spec, folder)
        self.journal.finish(model, seq, outcome, made)
        self._loop.call_soon_threadsafe(self._wake, model)

    def _wake(self, model: str) -> None:
        self._told.pop(model, asyncio.Event()).set()

    def exported(self, model: str, seq: int, operation: Export) -> None:
        if (found := self.models.get(model)) is not None:
            self._loop.call_soon_threadsafe(self._publish, found, seq, operation)

    def forget(self, model: str, seq: int) -> None:
        if (found := self.models.get(model)) is not None:
            self.journal.forget(replace(found, snapshot=seq))
            self._num_bytes[model] = self.journal.num_bytes(model)
