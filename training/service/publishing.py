"""Pushes exported adapters to the cluster's router, in the name of the tenant whose model it is."""

import asyncio
import logging
import shutil
from pathlib import Path

from adapters.identity import full_name_of
from training.errors import TrainingError
from training.executor.operations import Done, Export, Failure
from training.runs.push import PushTarget
from training.service.commands import Commands
from training.service.journal import Checkpoint, Model, Record, Sampler

_AT_ONCE = 2  # pushes
_ALIASES = 16  # of adapters that are for sampling sessions: so many are in workers' memory

log = logging.getLogger(__name__)


class Keys:
    """The keys of tenants, as they were seen last: in memory only. After a start, a tenant's comes with a request."""

    def __init__(self) -> None:
        self._keys: dict[str, str | None] = {}
        self._seen = asyncio.Event()

    def note(self, tenant: str, key: str | None) -> None:
        if self._keys.get(tenant, "") != key:
            self._keys[tenant] = key
            self._seen.set()
            self._seen = asyncio.Event()

    async def of(self, tenant: str) -> str | None:
        """Waits until the tenant has made a request."""
        while tenant not in self._keys:
            await self._seen.wait()
        return self._keys[tenant]


class Publisher:
    """Each push finishes its command."""

    def __init__(self, commands: Commands, keys: Keys, router: str | None, folder: Path) -> None:
        self._commands, self._keys, self._router, self._folder = commands, keys, router, folder
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, model: Model, seq: int, task: Export) -> None:
        running = asyncio.create_task(self._publish(model, seq, task))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Unfinished pushes are made again after a start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _publish(self, model: Model, seq: int, task: Export) -> None:
        folder = self._folder / task.folder
        outcome: Done | Failure
        made: Record | None = None
        try:
            adapter = await self._pushed(model, task, folder)
        except TrainingError as error:
            outcome = Failure(str(error), is_users=False)
        except Exception:
            log.exception("a push failed", extra={"fields": {"model": model.id, "seq": seq}})
            outcome = Failure("the trainer's log has the reason", is_users=False)
        else:
            if task.path is not None:
                outcome = Done({"path": task.path})
                made = Checkpoint(task.path, model.tenant, model.spec, task.folder, adapter)
            else:
                assert task.sampler is not None
                outcome = Done({"sampling_session_id": task.sampler})
                made = Sampler(task.sampler, model.tenant, model.session, None, adapter)
        await asyncio.to_thread(self._commands.finish, model.id, seq, outcome, made)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _pushed(self, model: Model, task: Export, folder: Path) -> str:
        """The adapter with its revision. Raises TrainingError."""
        if self._router is None:
            raise TrainingError("this trainer was started without a router; there is nothing to sample with")
        name = model.spec.adapter or full_name_of(model.tenant, "train." + model.id.replace(":train:", "."))
        if task.path is not None:
            alias = task.path.rpartition("/")[2]
        else:
            assert task.sampler is not None
            alias = f"sampler-{int(task.sampler.rpartition(':')[2]) % _ALIASES}"
        key = await self._keys.of(model.tenant)
        target = PushTarget(self._router, name, key, alias, memory_only=task.path is None)
        async with self._turns:
            answer = await asyncio.to_thread(target.push, folder)
        return f"{name}@{answer['revision']}"
