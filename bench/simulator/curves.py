"""Measured curves of a worker, in small JSON files: how long batches, steps, transfers and loads take.

Lines between the measured points, the last line's slope beyond them. bench/simulator/measured/ has those that are kept.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec

from bench.errors import OptionInvalid

FOLDER = Path(__file__).parent / "measured"
Point = tuple[float, float]


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a batch of prompts, which runs by itself."""

    batch_ms: tuple[Point, ...]  # new tokens of all its prompts, time without adapters
    pair_ns: float = 0.0  # for each new token and each token before it in its prompt: attention
    prompt_ms: float = 0.0  # for each prompt
    adapter_factor: float = 1.0  # on all of it, if every token is under an adapter


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a decode step."""

    step_ms: tuple[Point, ...]  # sequences, time with no context
    kv_token_ns: float = 0.0  # for each token of KV of all of them


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the end of a prompt's prefill until its KV is at the decode worker and known to be there."""

    prompt_ms: tuple[Point, ...] = ((0.0, 0.0),)  # tokens of the prompt, time


class Loads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of cold adapters into host memory."""

    store_ms: float = 0.0  # one alone
    serial_ms: float = 0.0  # of it, what no other load overlaps
    parallel: int = 8
    fill_ms: float = 0.0  # of a slot on the GPU, within a prefill batch


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's settings."""

    chunk_tokens: int = 2048  # of a prefill batch
    max_running: int = 64  # sequences that generate
    max_kv_tokens: int = 1_000_000
    slots: int = 8
    prompts_wait_steps: int = 0  # decode steps between two batches of prompts, while eight sequences or more generate


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker on one kind of machine."""

    name: str
    text: str
    sources: dict[str, str]  # of each part: file, command and commit; or that it is assumed
    prefill: Prefill
    decode: Decode
    transfer: Transfer = Transfer()
    loads: Loads = Loads()
    limits: Limits = Limits()
    answer_ms: float = 0.0  # until the client has what the engine knows: router, HTTP, tokenizer

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec turns into its own error with the place."""
        for name, points in (
            ("prefill.batch_ms", self.prefill.batch_ms),
            ("decode.step_ms", self.decode.step_ms),
            ("transfer.prompt_ms", self.transfer.prompt_ms),
        ):
            if not points:
                raise ValueError(f"{name} has no points")
            if any(after[0] <= before[0] for before, after in pairwise(points)):
                raise ValueError(f"{name}: the points are not in ascending order")
            if any(x < 0 or not 0 <= y < 1e9 for x, y in points):
                raise ValueError(f"{name}: a point is negative")
        limits = self.limits
        if min(limits.chunk_tokens, limits.max_running, limits.max_kv_tokens, limits.slots, self.loads.parallel) < 1:
            raise ValueError("limits and loads.parallel are at least 1")
        if limits.prompts_wait_steps < 0:
            raise ValueError("limits.prompts_wait_steps is negative")


def read_curves(name_or_path: str) -> Curves:
    """One of those that are kept, by name, or a file. Raises OptionInvalid."""
    path = FOLDER / f"{name_or_path}.json" if name_or_path in names() else Path(name_or_path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Curves)
    except OSError as error:
        raise OptionInvalid(f"--curves {path}: {error.strerror}; there are {', '.join(names())}") from error
    except msgspec.MsgspecError as error:
        raise OptionInvalid(f"--curves {path}: {error}") from error


def names() -> list[str]:
    """Of the curves that are kept."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


class Line:
    """A function given by points: straight lines between them and beyond the last, constant before the first."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]

    def __call__(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return max(0.0, ys[i - 1] + share * (ys[i] - ys[i - 1]))


class EngineTimes:
    """The curves of an engine, in seconds, ready for use."""

    def __init__(self, curves: Curves) -> None:
        self.curves = curves
        self._batch_ms = Line(curves.prefill.batch_ms)
        self._transfer_ms = Line(curves.transfer.prompt_ms)
        self.kv_token_s = 1e-9 * curves.decode.kv_token_ns
        self.fill_s = curves.loads.fill_ms / 1000
        self.answer_s = curves.answer_ms / 1000

    @cached_property
    def steps_s(self) -> list[float]:
        """By the number of sequences, without their context."""
        line = Line(self.curves.decode.step_ms)
        return [line(number) / 1000 for number in range(self.curves.limits.max_running + 1)]

    def batch_s(self, new_tokens: float, num_prompts: int, pairs: float, adapted_share: float) -> float:
        """A prefill batch. `pairs`: new tokens times the tokens before each, summed."""
        prefill = self.curves.prefill
        ms = self._batch_ms(new_tokens) + 1e-6 * prefill.pair_ns * pairs + num_prompts * prefill.prompt_ms
        return ms * (1 + adapted_share * (prefill.adapter_factor - 1)) / 1000

    def transfer_s(self, prompt_tokens: int) -> float:
        return self._transfer_ms(prompt_tokens) / 1000
