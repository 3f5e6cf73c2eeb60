"""How the engines of a system are started: side by side where each has a GPU, in turn where they share one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from bench.errors import SystemFailed
from bench.load.options import Endpoint
from bench.matrix import systems
from bench.matrix.options import Options
from bench.matrix.plan import cells_of, matrix_named
from bench.matrix.systems import Starter, gpus_of
from bench.systems.layout import Layout
from cluster.local.gpus import Gpu, HostGpus
from engine.arguments import EngineSpec

HANG_GUARD_S = 30


class Engines:
    """Stand-ins; `starting` returns when one is up."""

    def __init__(self, starting: Callable[[Engines, EngineSpec], Awaitable[object]]) -> None:
        self._starting = starting
        self.began: list[str] = []
        self.up: list[str] = []
        self.ended: list[str] = []
        self.gpus: dict[str, tuple[int, ...]] = {}

    @contextlib.asynccontextmanager
    async def running(self, spec: EngineSpec) -> AsyncIterator[None]:
        name = spec.scratch.name
        self.began.append(name)
        self.gpus[name] = spec.visible_gpus
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await self._starting(self, spec)
            self.up.append(name)
            yield
        finally:
            self.ended.append(name)


def on_gpus(name: str, num_gpus: int, layout: Layout | None = None) -> Options:
    return Options(
        layout=layout,
        systems=(name,),
        cells=cells_of([matrix_named("pioneer")], device="cuda"),
        slo_ms={},
        duration_s=1,
        device="cuda",
        num_gpus=num_gpus,
    )


def host_of(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs in reverse, as CUDA_VISIBLE_DEVICES can order them."""
    gpus = tuple(Gpu(index, f"GPU-{index}") for index in reversed(range(num_gpus)))
    monkeypatch.setattr(systems, "list_gpus", lambda _environment: HostGpus(gpus))


async def start(
    name: str, num_gpus: int, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    layout: Layout | None = None,
) -> Endpoint:  # fmt: skip
    async def loaded(*_: object) -> None: ...

    host_of(4, monkeypatch)
    monkeypatch.setattr(systems, "running_engine", engines.running)
    monkeypatch.setattr(systems, "load_adapters", loaded)
    options = on_gpus(name, num_gpus, layout)
    async with contextlib.AsyncExitStack() as stack:
        return await Starter(options, tmp_path, stack, gpus_of(options))._start(name, [])


@pytest.mark.parametrize(
    ("name", "num_gpus", "names"),
    [
        ("pair", 2, {"engine-pair-prefill-0", "engine-pair-decode-1"}),
        ("none", 4, {f"engine-none-{n}" for n in range(4)}),
    ],
)
async def test_engines_with_gpus_of_their_own_start_together(name, num_gpus, names, tmp_path, monkeypatch):
    all_began = asyncio.Barrier(len(names))
    engines = Engines(lambda *_: all_began.wait())
    started = await start(name, num_gpus, engines, tmp_path, monkeypatch)
    assert set(engines.up) == set(engines.ended) == names
    assert len(started.engines) == (num_gpus // 2 if name == "pair" else num_gpus)
    if name == "pair":  # each sees its peer's, which NVLink needs
        assert engines.gpus == {"engine-pair-prefill-0": (3, 2), "engine-pair-decode-1": (2, 3)}
    else:
        assert engines.gpus == {f"engine-none-{n}": (3 - n,) for n in range(4)}


@pytest.mark.parametrize("name", ["none", "stock_pd"])
async def test_prefill_and_decode_engines_meet_in_every_pair_equally_often(name, tmp_path, monkeypatch):
    async def at_once(*_: object) -> None: ...

    engines = Engines(at_once)
    started = await start(name, 4, engines, tmp_path, monkeypatch, Layout(prefill=3, decode=1))
    assert engines.gpus == {
        **{f"engine-{name}-prefill-{n}": (3 - n, *(each for each in (3, 2, 1, 0) if each != 3 - n)) for n in range(3)},
        f"engine-{name}-decode-3": (0, 3, 2, 1),
    }
    [decode] = {each.url for each in started.engines}
    prefills = [each.prefill for each in started.engines]
    assert len({each.url for each in prefills if each is not None} - {decode}) == 3
    assert {each.decode_has_adapters for each in started.engines} == {name == "stock_pd"}
    started = await start(name, 4, Engines(at_once), tmp_path, monkeypatch, Layout(prefill=2, decode=2))
    assert len({(each.url, each.prefill) for each in started.engines}) == 2


def test_more_gpus_than_this_process_may_use(monkeypatch):
    host_of(1, monkeypatch)
    assert gpus_of(on_gpus("none", 1)) == ()
    with pytest.raises(SystemFailed, match=r"--gpus 2: this host has 1 \(0\)\. Ask for fewer"):
        gpus_of(on_gpus("none", 2))


async def test_a_pair_on_one_gpu_starts_in_turn(tmp_path, monkeypatch):
    async def alone(engines: Engines, _: EngineSpec) -> None:
        await asyncio.sleep(0)
        assert len(engines.began) == len(engines.up) + 1

    engines = Engines(alone)
    await start("pair", 1, engines, tmp_path, monkeypatch)
    assert engines.began == engines.up == ["engine-pair-prefill-0", "engine-pair-decode-1"]


async def test_one_that_does_not_start_ends_the_others(tmp_path, monkeypatch):
    async def no_decode(_: Engines, spec: EngineSpec) -> None:
        if spec.role == "decode":
            raise SystemFailed("it has no memory")
        await asyncio.Event().wait()

    engines = Engines(no_decode)
    with pytest.raises(SystemFailed, match="it has no memory"):
        await start("pair", 2, engines, tmp_path, monkeypatch)
    assert sorted(engines.ended) == sorted(engines.began)
    assert not engines.up
