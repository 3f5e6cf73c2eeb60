"""Creates many random adapters in the forms that engines load."""

import functools
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.files.locked_folder import SHARED_MEMORY
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.model.normal_form import Positions
from adapters.model.serving import EngineDtype
from adapters.packed import write_for_engine
from samples.random_adapters import write_random_direft, write_random_lora

_REFT_STD = 4.0  # each layer changes the residual stream by about a quarter, so that all answers differ


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """One adapter on disk."""

    name: str
    source: Path  # its original directory
    serving: Path  # its packed directory, which our engines load
    revision_id: str


@contextmanager
def adapters_folder(device: str, folder: Path) -> Iterator[Path]:
    """Where engines of this device find adapters; below `folder` for CPUs.

    GPU engines find them in shared memory, as agents keep them. CUDA can page-lock a file there and not on every disk,
    and the copy of an adapter that is not page-locked keeps the scheduler for 12 ms instead of 0.3.
    """
    if device == "cpu":
        yield folder / "adapters"
        return
    with tempfile.TemporaryDirectory(prefix="prelude-bench-", dir=SHARED_MEMORY) as shared:
        yield Path(shared)


def prepare_adapters(
    kind: str,
    rank: int,
    count: int,
    base: BaseModel,
    dtype: EngineDtype,
    folder: Path,
    forms: frozenset[str],
    positions: Positions = "prefill",
) -> list[PreparedAdapter]:
    """Write `count` different adapters: "lora" on all seven projections or "direft" on every layer.

    Those for other `positions` have the same weights. Keeps only the given `forms`, "source", "serving" or both:
    hundreds of large adapters fill a disk.
    """
    prepare = functools.partial(_prepare, kind, rank, base, dtype, folder, forms, positions)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(prepare, range(count), chunksize=4))


def _prepare(
    kind: str,
    rank: int,
    base: BaseModel,
    dtype: EngineDtype,
    folder: Path,
    forms: frozenset[str],
    positions: Positions,
    number: int,
) -> PreparedAdapter:
    name = f"{kind}-{number}" if positions == "prefill" else f"{kind}-{positions}-{number}"
    if kind == "lora":
        source = write_random_lora(
            folder / name, base, number, rank=rank, alpha=2 * rank, dtype=dtype, positions=positions
        )
    else:
        source = write_random_direft(folder / name, base, number, rank=rank, dtype=dtype, std=_REFT_STD)
    adapter = replace(read_adapter(source, base, Limits()), positions=positions)
    serving = folder / f"{name}.serving"
    prepared = PreparedAdapter(name, source, serving, revision_id_of(adapter))
    if "serving" in forms:
        write_for_engine(adapter, base, dtype, serving)
    if "source" not in forms:
        shutil.rmtree(source)
    return prepared
