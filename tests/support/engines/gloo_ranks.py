"""Ranks that exchange tensors, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def on_ranks(folder: Path, work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What `work(*arguments[rank])` returns on each rank of a new gloo group, which is torch's default group there.

    `work` is a function of a module, so that processes can import it; `folder` is where the ranks find each other.
    """
    spawned = multiprocessing.get_context("spawn")
    answers = spawned.Queue()
    ranks = [
        spawned.Process(target=_run, args=(folder, rank, len(arguments), work, words, answers), daemon=True)
        for rank, words in enumerate(arguments)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    return [found[rank] for rank in range(len(ranks))]


def _run(folder: Path, rank: int, count: int, work: Callable[..., Any], words: tuple[Any, ...], answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=count)
    answers.put((rank, work(*words)))
    dist.barrier()
