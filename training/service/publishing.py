"""Pushes exported adapters to the cluster's router, in the name of the tenant whose model it is."""

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from adapters.files.locked_folder import SHARED_MEMORY
from adapters.identity import full_name_of
from training.errors import FolderNotSeen, PushFailed, TrainingError
from training.executor.operations import Done, Export, Failure
from training.runs.push import PushTarget
from training.service.commands import Commands, checkpoint_of
from training.service.identity import TRAINER_HEADER, headers_of_router, name_of
from training.service.journal import Model, Pushed, Record, Sampler
from training.trainable.exports import Exports
from training.trainable.packed import ServedWeights

_AT_ONCE = 2  # pushes
_ALIASES = 16  # of sampling clients of one session: so many are in workers' memory

_THIS_HOST = ("127.0.0.1", "::1", "localhost")
_FAILURES = 4  # to remove aliases, each of another tenant: the router may be away

log = logging.getLogger(__name__)


class Publisher:
    """Each push finishes its command. What sampling sessions had at the router goes with them."""

    def __init__(
        self,
        commands: Commands,
        router: str,
        secret: str,
        done: asyncio.Event,
        tls: Callable[[], ssl.SSLContext | bool] = lambda: True,
    ) -> None:
        """`secret`: with which the router knows this trainer, since clients' keys end before their sessions do.

        `done` is set after each push.
        """
        self._commands, self._router, self._tls = commands, router, tls
        self._exports = Exports()
        self._secret, self._done = secret, done
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[asyncio.Task[None], tuple[Model, Export]] = {}
        self._begun: set[asyncio.Task[None]] = set()  # of these: nothing can stop them

    @property
    def _is_near(self) -> bool:
        """Whether the router is on this host."""
        return urlsplit(self._router).hostname in _THIS_HOST

    def publish(self, model: Model, seq: int, task: Export, weights: ServedWeights) -> None:
        running = asyncio.create_task(self._publish(model, seq, task, weights))
        self._tasks[running] = model, task
        running.add_done_callback(self._forget)

    def _forget(self, running: asyncio.Task[None]) -> None:
        self._done.set()
        del self._tasks[running]
        self._begun.discard(running)

    async def stop(self) -> None:
        """Unfinished pushes are made again after a start."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._exports.close)

    def end(self, model: str) -> bool:
        """Push nothing more of a model, as for want of a key; False: something is on its way, so not now."""
        own = [task for task, (its, _) in self._tasks.items() if its.id == model]
        if not self._begun.isdisjoint(own):
            return False
        for task in own:
            task.cancel()
        return True

    async def clear(self, sessions: Collection[str]) -> None:
        """Remove aliases of sampling sessions that have ended, of models that are gone, and old ones of long sessions.

        `sessions`: those that go on. What cannot be removed now is tried again by a later call.
        """
        pushes, newest = {task.sampler for _, task in self._tasks.values()}, Counter[str]()
        due = defaultdict[str, list[Pushed]](list)  # by tenant
        for pushed in reversed(self._commands.journal.all(Pushed)):
            newest[pushed.session] += 1
            is_used = pushed.session in sessions and pushed.model in self._commands.models
            if pushed.id not in pushes and not (is_used and newest[pushed.session] <= _ALIASES):
                due[pushed.tenant].append(pushed)
        failures = 0
        # One that is always refused holds no other up. Its tenant may have seen to that: each has one failure.
        for own in random.sample(list(due.values()), len(due)):
            random.shuffle(own)
            while own and failures < _FAILURES:
                if not await self._remove(own.pop()):
                    failures += 1
                    break

    async def _remove(self, pushed: Pushed) -> bool:
        """False: not now."""
        try:
            headers = headers_of_router(self._secret, name_of(pushed.tenant), None)
            target = PushTarget(self._router, pushed.adapter, alias=pushed.alias, headers=headers, tls=self._tls)
            await asyncio.to_thread(target.remove_alias)
        except TrainingError as error:
            fields = {"adapter": pushed.adapter, "alias": pushed.alias, "reason": str(error)}
            log.warning("an alias was not removed", extra={"fields": fields})
            return False
        await asyncio.to_thread(self._commands.journal.remove, pushed)
        return True

    async def _publish(self, model: Model, seq: int, task: Export, weights: ServedWeights) -> None:
        outcome: Done | Failure
        made: Record | None = None
        try:
            adapter = await self._pushed(model, seq, task, weights)
        except TrainingError as error:
            outcome = Failure(str(error), is_users=False)
        except Exception:
            log.exception("a push failed", extra={"fields": {"model": model.id, "seq": seq}})
            outcome = Failure("the trainer's log has the reason", is_users=False)
        else:
            scores_prompts = model.spec.positions == "all" or weights.changes_nothing
            if task.path is not None:
                outcome = Done({"path": task.path})
                made = checkpoint_of(model, task, task.path, adapter, scores_prompts)
            else:
                assert task.sampler is not None
                outcome = Done({"sampling_session_id": task.sampler})
                made = Sampler(task.sampler, model.tenant, model.session, None, adapter, scores_prompts)
        await asyncio.to_thread(self._commands.published, model.id, seq, outcome, made)
        if self._is_near:
            asyncio.get_running_loop().run_in_executor(None, self._exports.prepare, weights.num_bytes)

    async def _pushed(self, model: Model, seq: int, task: Export, weights: ServedWeights) -> str:
        """The adapter with its revision. Raises TrainingError."""
        default = full_name_of(name_of(model.tenant), "train." + model.id.replace(":train:", "."))
        name = model.spec.adapter or default
        if task.path is not None:
            alias = task.path.rpartition("/")[2]
        else:
            assert task.sampler is not None
            alias = "sampler-" + task.sampler.replace(":sample:", "-")
        key = await self._commands.key_of(model.id, seq)  # another one of the tenant may be allowed less, or more
        headers, in_memory = {TRAINER_HEADER: self._secret}, task.path is None
        target = PushTarget(self._router, name, key, alias, headers=headers, memory_only=in_memory, tls=self._tls)
        async with self._turns:
            running = asyncio.current_task()
            assert running is not None
            self._begun.add(running)
            if task.sampler is not None:  # before it is there: nothing is forgotten by a kill
                pushed = Pushed(task.sampler, model.tenant, model.id, model.session, name, alias)
                await asyncio.to_thread(self._commands.log, partial(self._commands.journal.put, pushed))
            begun_s, result = time.monotonic(), "failed"
            try:
                answer = await asyncio.to_thread(self._push, target, weights)
                result = "done"
            finally:
                self._commands.metrics.push_seconds.labels(result).observe(time.monotonic() - begun_s)
        return f"{name}@{answer['revision']}"

    def _push(self, target: PushTarget, weights: ServedWeights) -> dict[str, Any]:
        """Push the packed file. Blocking. Raises PushFailed."""
        is_near = self._is_near
        try:
            with self._exports.file(weights.num_bytes, in_memory=is_near) as file:
                weights.write(file.mapped)
                if is_near:
                    with contextlib.suppress(FolderNotSeen):  # as in another container
                        return replace(target, by_folder=True).push(file.folder)
                return target.push(file.folder)
        except OSError as error:
            where = SHARED_MEMORY if is_near else "TMPDIR"
            message = f"the weights cannot be written to {where} ({error.strerror}); give it more room"
            raise PushFailed(message) from error
