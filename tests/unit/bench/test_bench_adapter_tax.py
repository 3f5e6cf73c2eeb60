"""The whole benchmark, on simulated systems."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bench import adapter_tax
from bench.errors import BenchError, SystemFailed, WrongAnswer
from bench.options import Options, Shape
from bench.systems import engines, start
from bench.systems.systems import SYSTEMS, Answer
from cli.main import main
from engine.supervisor import EngineSnapshot, EngineStatus

SHAPE = Shape(prompt_tokens=8, generated_tokens=4, concurrency=2, num_requests=6)
OPTIONS = Options(SYSTEMS, (1, 3), 2, SHAPE, 8, "engines")


@dataclass
class Pretended:
    """Answers at once, differently for each adapter that is not dropped."""

    name: str
    dropped: frozenset[int] = frozenset()
    cached_tokens: int = 0
    seen: list = field(default_factory=list)

    async def send(self, request, num_tokens, with_logprobs=False):
        self.seen.append((tuple(request.prompt), request.adapter))
        await asyncio.sleep(0.001)
        adapter = None if self.name == "none" or request.adapter in self.dropped else request.adapter
        logprobs = (-1.0 if adapter is None else float(adapter),) * num_tokens if with_logprobs else ()
        return Answer((7,) * num_tokens, logprobs, self.cached_tokens)


@pytest.fixture
def systems(monkeypatch):
    """The five systems, simulated."""
    made = [Pretended(name) for name in SYSTEMS]

    class Base:
        vocabulary = 1024

    async def start_all(self, say):
        return Base, [system for system in made if system.name in self.options.systems]

    monkeypatch.setattr(start.Starter, "start_all", start_all)
    return made


def test_every_system_gets_the_same_load_in_turn(systems, tmp_path, capsys):
    path, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    adapter_tax.run(OPTIONS, "prelude bench adapter-tax", path, plot, print)
    document = json.loads(path.read_text())
    measured = [(each["repeat"], each["adapters"], each["system"]) for each in document["repeats"]]
    baseline, rest = ["none", "pd"], list(SYSTEMS)
    there = [(n, system) for n in (0, 1, 3) for system in (rest if n else baseline)]
    assert measured == [(0, *each) for each in there] + [(1, *each) for each in reversed(there)]
    assert {(row["system"], row["adapters"]) for row in document["rows"]} == {each[:0:-1] for each in measured}
    assert {"commit", "command", "hardware", "versions", "settings", "ratios"} <= document.keys()
    loads = {system.name: [each for each in system.seen[4:] if each[1] is not None] for system in systems}
    assert len(loads["stock"]) == 2 * 2 * (2 + 6)  # repeats x numbers of adapters x warm-up and load
    assert all(load == loads["stock"] for load in loads.values())
    assert len({prompt for prompt, _ in loads["stock"]}) == len(loads["stock"])
    assert {adapter for _, adapter in loads["pd"]} == {0, 1, 2}
    assert "c/a" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


def test_shares_of_adapters_that_act_at_all_positions(systems, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    options = replace(OPTIONS, systems=("none", "stock", "unified_lora"), adapters=(4,), repeats=1)
    adapter_tax.run(replace(options, all_shares=(0.0, 0.25, 0.5, 1.0)), "", path, tmp_path / "plot.png", print)
    document = json.loads(path.read_text())
    mixes = ["unified_lora", "unified_lora@0.25", "unified_lora@0.5", "unified_lora@1"]
    assert [each["system"] for each in document["repeats"]] == ["none", "none", "stock", *mixes]
    assert [row["system"] for row in document["rows"]] == ["none", "none", "stock", *mixes]
    assert set(document["ratios"]) == {"c/a", "c/b"}
    served = [adapter for _, adapter in systems[2].seen]
    assert served[:9] == [None, *range(8)], "each adapter is checked for both positions"
    loads = [Counter(served[9 + 8 * mix : 17 + 8 * mix]) for mix in range(4)]  # two to warm up, then six
    assert [set(load) for load in loads] == [{0, 1, 2, 3}, {0, 1, 2, 7}, {0, 5, 2, 7}, {4, 5, 6, 7}]
    prompts = [prompt for prompt, _ in systems[2].seen[9:]]
    assert len(set(prompts)) == len(prompts), "no mix finds another's prompts in the prefix cache"
    told = capsys.readouterr().out
    assert "unified_lora@0.25" in told
    assert "c: one engine, the same LoRA at prefill only, but at all positions in 25% of the requests" in told


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"all_shares": (0.25,)}, "--all-shares 0.25: of 1 adapters that is 0.25"),
        ({"all_shares": (1.0,), "systems": ("none", "stock")}, "--systems leaves out"),
    ],
)
def test_shares_that_cannot_be_measured_are_refused_first(systems, change, complaint):
    with pytest.raises(BenchError, match=complaint):
        adapter_tax.run(replace(OPTIONS, **change), "", None, None, print)
    assert not systems[0].seen


def test_a_dropped_adapter_is_noticed(systems):
    systems[2].dropped = frozenset({2})
    with pytest.raises(WrongAnswer, match="unified_lora: the base model and 3 adapters gave 3 different answers"):
        adapter_tax.run(OPTIONS, "", None, None, print)


def test_prefix_cache_hits_are_noticed(systems):
    systems[1].cached_tokens = 1
    with pytest.raises(WrongAnswer, match="stock found 6 prompt tokens in its prefix cache"):
        adapter_tax.run(OPTIONS, "", None, None, print)


def test_files_that_cannot_be_written_are_refused_first(systems, tmp_path):
    with pytest.raises(BenchError, match="there is no folder"):
        adapter_tax.run(OPTIONS, "", tmp_path / "nowhere" / "file.json", None, print)
    assert not systems[0].seen


@pytest.mark.parametrize(
    "words",
    [
        ["--systems", "none,fast"],
        ["--adapters", "0"],
        ["--adapters", "1,x"],
        ["--repeats", "-1"],
        ["--all-shares", "2"],
    ],
)
def test_wrong_arguments(words):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "adapter-tax", *words])
    assert ended.value.code == 2


def test_stock_with_weights_of_its_own_is_refused_first(systems):
    with pytest.raises(SystemExit, match="stock SGLang loads no adapters beside"):
        main(["bench", "adapter-tax", "--quick", "--systems", "stock", "--engine-arguments=--load-format dummy"])


def test_the_command(systems, monkeypatch, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    words = ["bench", "adapter-tax", "--quick", "--systems", "stock,none", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["prelude", *words])
    main(words)
    document = json.loads(path.read_text())
    assert document["command"] == "prelude bench adapter-tax --quick --systems stock,none --json numbers.json"
    assert document["settings"]["systems"] == ["none", "stock"]
    assert document["settings"]["adapters"] == [1, 8]
    systems[1].dropped = frozenset({0})
    with pytest.raises(SystemExit, match="different answers"):
        main(words)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    assert "adapter-tax" in capsys.readouterr().out


def test_the_ranks_of_each_engine(systems, tmp_path):
    path = tmp_path / "numbers.json"
    words = ["--quick", "--systems", "none", "--tensor-parallel", "2", "--json", str(path)]
    main(["bench", "adapter-tax", *words])
    assert json.loads(path.read_text())["settings"]["tensor_parallel"] == 2
    options = replace(OPTIONS, tensor_parallel=2)
    assert engines.engine_spec("unified", Path("m"), None, options, Path("s")).tensor_parallel == 2


class PretendedSupervisor:
    """An engine that starts and dies, or does not start."""

    comes_up = True

    def __init__(self, spec, start_timeout_s, on_change):
        self.on_change = on_change
        self.snapshot = EngineSnapshot(EngineStatus.STARTING, "", (), 0, "starting")

    def set(self, status, incarnation, reason):
        self.snapshot = EngineSnapshot(status, incarnation, (), 0, reason)
        self.on_change(self.snapshot)

    async def run(self):
        if self.comes_up:
            self.set(EngineStatus.UP, "one", "")
            await asyncio.sleep(0.01)
        self.set(EngineStatus.DOWN, "", "it ran out of luck")
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("comes_up", "complaint"), [(False, "did not start: it ran"), (True, "died during the benchmark: it ran")]
)
def test_an_engine_that_fails_fails_the_benchmark(monkeypatch, comes_up, complaint):
    monkeypatch.setattr(engines, "EngineSupervisor", PretendedSupervisor)
    monkeypatch.setattr(PretendedSupervisor, "comes_up", comes_up)

    async def use():
        async with engines.running_engine(engines.engine_spec("stock", Path("m"), None, OPTIONS, Path("s"))):
            await asyncio.sleep(0.1)

    with pytest.raises(SystemFailed, match=complaint):
        asyncio.run(use())


def test_a_request_that_fails_because_the_engine_died_says_so(monkeypatch):
    monkeypatch.setattr(engines, "EngineSupervisor", PretendedSupervisor)
    monkeypatch.setattr(engines, "_NOTICE_S", 0.1)

    async def use():
        async with engines.running_engine(engines.engine_spec("stock", Path("m"), None, OPTIONS, Path("s"))):
            raise SystemFailed("server disconnected")

    with pytest.raises(SystemFailed, match="died during the benchmark: it ran out of luck") as caught:
        asyncio.run(use())
    assert "disconnected" in str(caught.value.__context__ or caught.value.__cause__)
