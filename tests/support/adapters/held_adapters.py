"""A worker's residency with a real store, packed files and shared memory; only the engine is a stand-in."""

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry
from support.adapters.random_adapters import write_random_lora
from support.constants import with_constants
from support.engines.engine_stand_in import Engine
from support.waiting import until

from adapters.files.locked_folder import SHARED_MEMORY
from adapters.formats import Limits, read_adapter
from adapters.identity import folder_of
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_packed
from adapters.store import AdapterStore, Envelope, open_store
from adapters.store.signing import Trust
from cluster.config.schema import ResidencyConfig
from cluster.control.worker_state import WorkerStateHub
from engine.client import EngineClient
from prefill_worker.residency import Acceptance, Residency
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.tiers.host_memory import room_bytes

CHUNK_BYTES = 1000
TRUSTS_EVERYBODY = Trust(lambda: (), True, True)


class StoredAdapters:
    """A store in a folder, and the packed files that it holds."""

    def __init__(self, base: BaseModel, packed: dict[str, Path], folder: Path) -> None:
        self.base = base
        self.folder = folder
        self.store = open_store(f"file://{folder}")
        self.ids = list(packed)
        self.packed = packed
        for revision_id, path in packed.items():
            self.store.publish(revision_id, path)
        self.room = room_bytes(packed[self.ids[0]].stat().st_size)  # of one adapter in host memory
        self.object_bytes = packed[self.ids[0]].stat().st_size + 88

    @staticmethod
    def pack_many(base: BaseModel, folder: Path, count: int) -> dict[str, Path]:
        packed = {}
        for seed in range(count):
            revision_id, path = pack(base, write_random_lora(folder / f"a{seed}", base, seed, rank=8), folder)
            packed[revision_id] = path
        assert len({path.stat().st_size for path in packed.values()}) == 1
        return packed

    def add(self, directory: Path, dtype: str = "float32") -> str:
        revision_id, path = pack(self.base, directory, self.folder.parent / "extra", dtype)
        self.store.publish(revision_id, path)
        return revision_id

    def move_away(self) -> None:
        self.folder.rename(self.folder.with_name("store-away"))

    def move_back(self) -> None:
        self.folder.with_name("store-away").rename(self.folder)

    def object_of(self, revision_id: str) -> Path:
        digits = revision_id.removeprefix("sha256:")
        return self.folder / "revisions" / digits[:2] / digits


def pack(base: BaseModel, directory: Path, folder: Path, dtype: str = "float32") -> tuple[str, Path]:
    adapter = read_adapter(directory, base, Limits())
    revision_id = revision_id_of(adapter)
    folder.mkdir(exist_ok=True)
    path = folder / folder_of(revision_id)
    write_packed(adapter, base, dtype, path)  # type: ignore[arg-type]
    return revision_id, path


def announced(revision_id: str, path: Path) -> tuple[Envelope, bytes]:
    """What a router announces of a packed file that it pushes, and the file's content."""
    content = path.read_bytes()
    return Envelope(revision_id, hashlib.sha256(content).hexdigest(), len(content)), content


async def sent(content: bytes, gate: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """The content in chunks, the second half once the gate opens."""
    for begin in range(0, len(content), CHUNK_BYTES):
        if gate is not None and begin >= len(content) // 2:
            await gate.wait()
        yield content[begin : begin + CHUNK_BYTES]


@dataclass
class Worker:
    """A residency and its collaborators."""

    residency: Residency
    engine: Engine
    hub: WorkerStateHub
    registry: CollectorRegistry
    disk: Path
    stored: StoredAdapters
    reads: list[str] = field(default_factory=list)  # revisions that were read from the store

    @property
    def shared(self) -> Path:
        return self.residency._folder.path

    def folders(self) -> list[Path]:
        """Folders of adapters in host memory."""
        return [path for path in self.shared.iterdir() if path.is_dir()]

    def host_bytes(self) -> int:
        """Of the adapters' files; the folder's own mark is a page more."""
        files = (path for path in self.shared.rglob("*/*") if path.is_file() and not path.name.startswith("."))
        return sum(path.lstat().st_blocks * 512 for path in files)

    def num_mappings(self) -> int:
        """Mappings of this worker's files in this process."""
        return Path("/proc/self/maps").read_text().count(str(self.shared))

    async def engine_ends(self) -> None:
        await self.engine.stop()
        self.hub.clear_resident()
        self.residency.engine_gone()

    async def new_engine(self) -> None:
        if self.engine.is_up:
            await self.engine_ends()
            await self.engine.start()
            self.residency.engine_up()

    def disk_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.disk.iterdir())

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"worker": "w", "role": "prefill", **labels}) or 0.0

    async def on_disk(self, *revision_ids: str) -> None:
        await until(lambda: all(each in self.hub.on_disk for each in revision_ids))

    async def load(self, *revision_ids: str) -> None:
        """Load revisions one after another, each until it is on the disk, too: until then it is not evicted."""
        for each in revision_ids:
            await self.residency.ensure(each, 5)
            await self.on_disk(each)

    async def put_on_disk(self, *revision_ids: str) -> None:
        """Leave revisions on the disk only."""
        for each in revision_ids:
            await self.load(each)
            await self.residency.evict(each, from_disk=False)


def bytes_at_one_moment(folder: Path) -> int:
    """Lower bound of the bytes in a folder at one moment: files that two scans in a row have seen.

    A new file may have the inode of one that has just been removed, but not its time.
    """

    def look() -> dict[tuple[int, int], int]:
        found = {}
        for parent, _, names in os.walk(folder):  # tolerates folders that are removed meanwhile
            for name in names:
                with suppress(OSError):
                    status = os.lstat(os.path.join(parent, name))
                    found[status.st_ino, status.st_ctime_ns] = status.st_size
        return found

    first, second = look(), look()
    return sum(first[file] for file in first.keys() & second.keys())


@asynccontextmanager
async def running_worker(
    stored: StoredAdapters,
    tmp_path: Path,
    *,
    host: int = 1000,
    disk: int = 1000,
    limits: Limits | None = None,
    engine: Engine | None = None,
    trust: Trust | None = None,
    shared_memory: Path = SHARED_MEMORY,
    **settings,
) -> AsyncIterator[Worker]:
    """A worker with room for `host` and `disk` adapters. Checks that no file, reservation, task or thread is left."""
    async with AsyncExitStack() as stack:
        engine = engine or await stack.enter_async_context(Engine().served())
        tasks_before, threads_before = asyncio.all_tasks(), threading.active_count()
        hub, registry, client = WorkerStateHub(), CollectorRegistry(), EngineClient(engine.url)
        sizes = {"host_bytes": host * stored.room, "disk_bytes": disk * stored.object_bytes}
        config = with_constants(ResidencyConfig, **{**sizes, "lease_s": 0.0, **settings})
        reads: list[str] = []
        residency = Residency(
            "w",
            config,
            tmp_path / "disk",
            lambda: _NotedStore(open_store(f"file://{stored.folder}"), reads),
            Acceptance(stored.base, "float32", limits or Limits(), frozenset({"prefill"}), trust or TRUSTS_EVERYBODY),
            client,
            hub,
            ResidencyMetrics(registry, "w", "prefill"),
            shared_memory,
        )
        worker = Worker(residency, engine, hub, registry, tmp_path / "disk", stored, reads)
        await residency.open()
        background = asyncio.create_task(residency.run())
        try:
            yield worker
            assert not background.done()
            await until(lambda: not residency._queue.keys)
            assert residency._queue.num_running == residency._queue.num_waiters == 0
            host = residency._host
            await until(lambda: not host._evicting_bytes)
            assert host._wanted_bytes == 0
            entries = list(host)
            assert host.used_bytes == sum(entry.num_bytes for entry in entries)
            await until(lambda: not residency._to_disk and not any(entry.num_holds for entry in host))
            assert residency._disk.used_bytes == sum(entry.num_bytes for entry in residency._disk._entries.values())
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await residency.aclose()
            await client.aclose()
        assert not worker.shared.exists()
        assert not [path for path in worker.disk.iterdir() if path.name.startswith(".")]
        await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - tasks_before if "aiohttp" not in repr(task)}
        assert not left, left
        assert threading.active_count() <= threads_before


class _NotedStore(AdapterStore):
    def __init__(self, store: AdapterStore, reads: list[str]) -> None:
        super().__init__(store._objects)
        self._reads = reads

    def begin_read(self, revision_id: str):
        self._reads.append(revision_id)
        return super().begin_read(revision_id)
