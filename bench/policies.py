"""Several policies in training on one base model with random weights: `python -m bench.policies --help`.

Each arm trains on the same rows, of 64 to 512 tokens, a third of them answers:

plain    the loop of `prelude train sft`, one policy
alone    the trainer without its HTTP, one policy after the other
turns    the same, all policies at once
shared   rows that hold sequences of all policies, one forward pass for all: without the trainer's log, so what sharing
         could bring at most

On a CPU, seconds are those of CPU time, since others may use its cores.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from adapters.model.base_model import BaseModel
from bench.errors import SystemFailed
from bench.measuring.output import require_folder, write_json
from bench.measuring.provenance import head
from bench.systems.models import MODELS, config_of
from training.adapted_model import attach
from training.data.examples import Example
from training.data.tokens import Turn
from training.executor.executor import ExecutorOptions
from training.executor.learner import Learner
from training.executor.operations import Datum, Failure, Pass, Spec, Step
from training.executor.turns import Share, Turns
from training.loop.batches import Batches
from training.loop.optimiser import AdamOptions, Optimiser
from training.loop.options import LoopOptions
from training.loop.run_folder import RunFolder
from training.loop.training import Trained, Training
from training.losses import Sft
from training.runs.base import LoadedBase, choose_threads
from training.service.commands import Commands
from training.service.identity import Caller
from training.service.journal import Journal, Model
from training.service.metrics import TrainerMetrics
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec
from training.tree.documents import merge
from training.tree.packing import pack

_RATIOS = (("alone", "plain"), ("turns", "alone"), ("shared", "alone"))
_LENGTHS = (64, 512)  # of rows
_TENANT = "bench"
_COMMAND_S = 600.0  # of one, which may compile kernels
_STEP = Step(1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0)

Options = argparse.Namespace
Data = Sequence[Sequence[Example]]  # by policy
Rates = dict[tuple[str, int], float]  # tokens/s by arm and rows of a step


class _Enough(Exception):
    """Ends the plain loop between two steps: otherwise it would write a checkpoint."""


def _plain(base: LoadedBase, examples: Sequence[Example], num_steps: int, options: Options, folder: Path) -> float:
    adapter, seldom = TrainableAdapter.create(AdapterSpec("lora", options.rank), base.sizes), num_steps + 2
    rows = {"batch_size": len(examples), "row_tokens": options.row_tokens}
    loop = LoopOptions(1e-4, max_steps=seldom, log_every=seldom, save_every=seldom, **rows)
    clock, at_s = _clock(base), list[float]()

    def watch() -> bool:
        at_s.append(clock())
        if len(at_s) == seldom:
            raise _Enough
        return False

    with closing(RunFolder(folder, {}, resume=False)) as run, _attached(base, [adapter]) as model, suppress(_Enough):
        trained = Trained(model, dict(adapter.named_parameters()), lambda _folder: None)
        batches = Batches(examples, "prefill", options.row_tokens, fixed_rows=False)
        Training(trained, Sft(), batches, loop, run).run(watch)
    return at_s[-1] - at_s[1]  # without the first step


def _shared(base: LoadedBase, data: Data, num_steps: int, options: Options) -> float:
    adapters = [TrainableAdapter.create(AdapterSpec("lora", options.rank), base.sizes) for _ in data]
    clock, began_s = _clock(base), 0.0
    with _attached(base, adapters) as model:
        optimisers = [Optimiser(dict(each.named_parameters()), AdamOptions()) for each in adapters]
        for step in range(num_steps + 1):
            began_s = clock() if step == 1 else began_s
            documents = [
                document
                for slot, examples in enumerate(data)
                for number, example in enumerate(examples)
                for document in example.documents(number, "prefill", slot)
            ]
            for row in pack(merge(documents, options.row_tokens), options.row_tokens):
                (-model.score(row).logprobs.sum()).backward()
            for optimiser in optimisers:
                optimiser.step(1e-4)
        return clock() - began_s


async def _trainer(base: LoadedBase, data: dict[int, Data], options: Options, folder: Path) -> tuple[Rates, int]:
    """And the bytes of an idle policy in the device's memory."""
    before, clock, spec, rates = _memory(base), _clock(base), Spec(options.rank, seed=1), Rates()
    journal, limits = Journal(folder / "commands.db"), ExecutorOptions(options.row_tokens, snapshot_s=1e9)
    commands = Commands(journal, base, options.model, folder, limits, Turns(lambda _: Share()), TrainerMetrics())
    commands.start(lambda *_: None)
    models = [f"{_TENANT}:train:{number}" for number in range(options.policies)]
    for model in models:
        await commands.create(Model(model, _TENANT, _TENANT, spec), spec)
    sent = dict.fromkeys(models, 0)

    async def train(model: str, examples: Sequence[Example], num_steps: int) -> None:
        accepted = []
        for operation in (Pass("cross_entropy", {}, tuple(map(_datum, examples))), _STEP) * num_steps:
            sent[model] += 1
            live, make, is_of_gradient = commands.models[model], partial(copy, operation), isinstance(operation, Pass)
            accepted.append(await commands.accept(live, sent[model], make, is_of_gradient=is_of_gradient))
        for each in accepted:
            found = await commands.outcome(Caller(_TENANT, None), each, _COMMAND_S)
            if found is None or isinstance(found, Failure):
                raise SystemFailed(f"{each}: {found}")

    for model in models:
        await train(model, data[options.rows[0]][0], 1)
    idle_bytes = (_memory(base) - before) // options.policies
    for count, each in data.items():
        num_steps = _num_steps(count)
        began_s = clock()
        for model, examples in zip(models, each, strict=True):
            await train(model, examples, num_steps)
        then_s = clock()
        await asyncio.gather(*(train(model, examples, num_steps) for model, examples in zip(models, each, strict=True)))
        num_tokens = num_steps * _num_tokens(each)
        rates["alone", count], rates["turns", count] = num_tokens / (then_s - began_s), num_tokens / (clock() - then_s)
    await commands.stop()
    journal.close()
    return rates, idle_bytes


def _datum(example: Example) -> Datum:
    [turn] = example.turns
    ids, first = np.array([*turn.context, *turn.answers[0]], np.int32), len(turn.context) - 1
    weights = np.ones(len(ids) - 1, np.float32).tobytes()
    return Datum(ids[:-1].tobytes(), ids[1:].tobytes(), ((first, len(ids) - 1),), {"weights": weights})


def _repeat(base: LoadedBase, options: Options, folder: Path) -> tuple[Rates, int]:
    data = {count: _data(options, count) for count in options.rows}
    (folder / "trainer").mkdir(parents=True)
    rates, idle_bytes = asyncio.run(_trainer(base, data, options, folder / "trainer"))
    for count, each in data.items():
        num_steps = _num_steps(count)
        plain_s = _plain(base, each[0], num_steps, options, folder / f"plain-{count}")
        rates["plain", count] = num_steps * _num_tokens(each[:1]) / plain_s
        rates["shared", count] = num_steps * _num_tokens(each) / _shared(base, each, num_steps, options)
    return rates, idle_bytes


def _num_steps(num_rows: int) -> int:
    return max(1, 6 // num_rows)


def _data(options: Options, num_rows: int) -> Data:
    """The same lengths for every policy, and other tokens."""
    random = np.random.default_rng(num_rows)
    lengths = random.integers(*_LENGTHS, num_rows, endpoint=True)
    ids = [[random.integers(0, 500, length).tolist() for length in lengths] for _ in range(options.policies)]
    return [
        [Example("", (Turn(row[: -(len(row) // 3)], (row[-(len(row) // 3) :],)),)) for row in policy] for policy in ids
    ]


def _num_tokens(data: Data) -> int:
    return sum(len(turn.context) + len(turn.answers[0]) for each in data for row in each for turn in row.turns)


@contextmanager
def _attached(base: LoadedBase, adapters: Sequence[TrainableAdapter]) -> Iterator[Any]:
    model = attach(base.model, adapters)
    try:
        yield model
    finally:
        model.detach()


def _clock(base: LoadedBase) -> Callable[[], float]:
    """Seconds, once the device has done what it was told."""

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized if base.model.device.type == "cuda" else time.process_time


def _memory(base: LoadedBase) -> int:
    """Bytes of the device that are in use."""
    gc.collect()
    if base.model.device.type == "cuda":
        return torch.cuda.memory_allocated()
    # No subclasses: compiled graphs keep tensors without memory.
    return sum(each.nbytes for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))


def _switches(base: LoadedBase, options: Options, folder: Path) -> dict[str, float]:
    """Seconds until a policy that is on the device, or on the disk, can be trained; and until it is exported."""
    spec, device = Spec(options.rank, seed=1), base.model.device
    clock = _clock(base) if device.type == "cuda" else time.perf_counter
    learner = Learner(spec, base.sizes, device)
    for each in learner.adapter.parameters():
        each.grad = torch.ones_like(each)
    learner.step(_STEP)  # makes moments
    learner.save(folder / "snapshot", 0, options.model)
    found: dict[str, list[float]] = {"resident_s": [], "disk_s": [], "export_s": []}
    for _ in range(options.repeats):
        for name, seconds in found.items():
            began_s = clock()
            if name == "export_s":
                learner.export(base.model.dtype).write(folder / "export")
            else:
                if name == "disk_s":
                    learner = Learner(spec, base.sizes, device)
                    learner.load(folder / "snapshot", whole=True)
                with _attached(base, [learner.adapter]):
                    pass
            seconds.append(clock() - began_s)
    return {name: round(median(seconds), 4) for name, seconds in found.items()}


def _base(options: Options, folder: Path) -> LoadedBase:
    from transformers import AutoModelForCausalLM

    config, _ = config_of(options.model)
    torch.manual_seed(0)
    with torch.device(options.device):
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    base = LoadedBase(model.eval(), None, BaseModel.read(folder), frozenset())
    choose_threads(base)
    return base


def measure(options: Options, command: str) -> dict[str, Any]:
    """The result, as a file has it."""
    began_s, found, idle = time.monotonic(), dict[tuple[str, int], list[float]](), list[int]()
    result = head("policies", command, vars(options), options.device)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        base = _base(options, folder)
        _repeat(base, options, folder / "warm-up")  # compiles, and lets the device's memory grow
        for repeat in range(options.repeats):
            print(f"repeat {repeat} begins after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
            if found and time.monotonic() - began_s > options.limit_s:
                break
            rates, idle_bytes = _repeat(base, options, folder / f"{repeat}")
            idle.append(idle_bytes)
            for key, rate in rates.items():
                found.setdefault(key, []).append(round(rate, 1))
        switches = _switches(base, options, folder)
        planned = Learner(Spec(options.rank, seed=1), base.sizes, "meta").num_bytes
        on_disk = sum(path.stat().st_size for path in (folder / "snapshot").rglob("*") if path.is_file())
    middle = {key: median(rates) for key, rates in found.items()}
    return {
        **result,
        "rows": [{"arm": arm, "rows": count, "tokens_per_s": rates} for (arm, count), rates in found.items()],
        "ratios": [
            {"rows": count, **{f"{arm}/{to}": round(middle[arm, count] / middle[to, count], 3) for arm, to in _RATIOS}}
            for count in options.rows
        ],
        "idle_policy": {"planned_bytes": planned, "device_bytes": int(median(idle)), "disk_bytes": on_disk},
        "switch": switches,
        "duration_s": round(time.monotonic() - began_s, 1),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description="Several policies in training.")
    parser.add_argument("--model", choices=MODELS, default="tiny", help="sizes; default: tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--rank", type=int, default=32, help="default: 32")
    parser.add_argument("--policies", type=int, default=3, help="default: 3")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="of a policy's step; default: 2 8")
    parser.add_argument("--row-tokens", type=int, default=512, help="read at once; default: 512")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--limit-s", type=float, default=150.0, help="no repeat begins after it; default: 150")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    options = parser.parse_args()
    path = vars(options).pop("json")
    require_folder(path)
    command = " ".join(["python -m bench.policies", *(Path(word).name for word in sys.argv[1:])])
    found = measure(options, command)
    write_json(found, path)
    print(*(f"{name}: {found[name]}" for name in ("rows", "ratios", "idle_policy", "switch", "duration_s")), sep="\n")


if __name__ == "__main__":
    _main()
