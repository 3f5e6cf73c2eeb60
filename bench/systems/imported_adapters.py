"""Random adapters in a cluster's catalog and store, before the cluster starts."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from adapters.model.base_model import BaseModel
from cluster.config.schema import ClusterConfig
from cluster.open_library import open_library
from samples.random_adapters import write_random_lora


def import_random_adapters(config: ClusterConfig, names: Sequence[str], processes: int = 1) -> int:
    """Import a different LoRA under each name, for all seven projections, of the rank that the cluster serves.

    Returns the packed bytes of one. With several processes at most eight: more find SQLite locked. Raises AdapterError.
    """
    numbers = range(len(names))
    import_some = functools.partial(_import, config, names)
    if processes == 1:
        return import_some(numbers)
    num_bytes = import_some(numbers[:1])  # creates the catalog
    with ProcessPoolExecutor(min(8, processes), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(import_some, ([number] for number in numbers[1:])))
    return num_bytes


def _import(config: ClusterConfig, names: Sequence[str], numbers: Sequence[int]) -> int:
    base, num_bytes, library = BaseModel.read(config.model.path), 0, open_library(config)
    try:
        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            for number in numbers:
                source = write_random_lora(
                    Path(folder), base, number, rank=config.adapter_limits.max_rank, dtype="bfloat16"
                )
                num_bytes = library.import_directory(names[number], source).bytes
    finally:
        library.catalog.close()
    return num_bytes
