"""The cells that run on every system, each a workload with its pace and one number of adapters; the named matrices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.errors import OptionInvalid
from bench.workloads.catalog import WORKLOADS
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import LORA_RANK, Workload

CPU_SCALE = 1 / 8  # of prompts and answers: two cores run a small model
_CPU_MAX_ADAPTERS = 128
_CPU_MAX_CONCURRENCY = 16
_PIONEER_COUNTS = (1, 2, 4, 8, 16, 32, 33, 48, 64, 128)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A named list of cells."""

    name: str
    workloads: tuple[Workload, ...]
    adapters: tuple[int, ...] = ()  # each workload at these numbers; empty: at its own
    num_slots: int = 32
    systems: tuple[str, ...] = ("none", "stock", "unified", "pair")
    to: str = "stock"  # the system that ratios are to
    host_adapters: int | None = None  # that fit in a worker's host memory, of clusters behind a router; None: all


MATRICES = {
    matrix.name: matrix
    for matrix in (
        # No cliff: adapters in turn over 32 slots. The slowest number of adapters should reach 0.9 of the fastest.
        Matrix("pioneer-sweep", (WORKLOADS["pioneer"],), _PIONEER_COUNTS),
        # What adapters cost: requests/s relative to no adapters, LoRA and DiReFT. The goal is 0.97 of none on a GPU.
        Matrix(
            "adapter-tax",
            (
                Workload("adapter-tax", "", "ours", lengths=FixedLengths(128, 256), concurrency=128),
                Workload("adapter-tax-long", "", "ours", lengths=FixedLengths(2048, 128), concurrency=32),
            ),
            (1, 8, 32, 64),
            systems=("none", "stock", "unified", "unified_direft", "pair"),
            to="none",
        ),
        # No cliff: 12 adapters in turn fit in 16 slots, 24 in host memory only, 64 in neither, so that every request
        # finds its adapter evicted. Whole clusters behind a router.
        Matrix(
            "cold",
            (Workload("cold", "", "ours", lengths=FixedLengths(1024, 128), concurrency=8, warm_up=64),),
            (12, 24, 64),
            num_slots=16,
            systems=("unified", "pair"),
            host_adapters=28,
        ),
        Matrix("published", tuple(WORKLOADS.values())),
    )
}


def matrix_named(name: str) -> Matrix:
    """A named matrix, or a workload as a matrix of its own. Raises OptionInvalid."""
    if name in MATRICES:
        return MATRICES[name]
    if name not in WORKLOADS:
        raise OptionInvalid(f"there is no matrix or workload {name!r}; there are {', '.join((*MATRICES, *WORKLOADS))}")
    return Matrix(name, (WORKLOADS[name],))


def cells_of(
    matrices: Sequence[Matrix],
    *,
    device: str,
    adapters: tuple[int, ...] = (),
    concurrency: int | None = None,
    scale: float | None = None,
    distribution: str | None = None,
    all_shares: tuple[float, ...] = (),
) -> tuple[Workload, ...]:
    """The cells of these matrices, each once. What is given takes the place of the workload's own.

    On a CPU prompts and answers are shorter, and there are fewer adapters and requests in flight, unless given. Each of
    `all_shares` makes a cell of its own. Raises OptionInvalid if a share is of no whole number of adapters.
    """
    cells = {}
    for matrix in matrices:
        for each in matrix.workloads:
            workload = _popular(_edition(each, device, scale), distribution)
            if concurrency is not None:
                workload = replace(workload, concurrency=concurrency, requests_per_s=None)
            for count in adapters or matrix.adapters or (_own_count(workload, device),):
                for share in all_shares or (0.0,):
                    cell = _with_share(replace(workload, num_adapters=count), share)
                    cells[cell.label] = cell
    return tuple(cells.values())


def lora_rank_of(cells: Sequence[Workload]) -> int:
    """Of the adapters, which all cells share: the workloads' rank, or if they differ the usual one."""
    ranks = {cell.lora_rank for cell in cells}
    return ranks.pop() if len(ranks) == 1 else LORA_RANK


def _edition(workload: Workload, device: str, scale: float | None) -> Workload:
    if device == "cpu" and workload.concurrency is not None:
        workload = replace(workload, concurrency=min(workload.concurrency, _CPU_MAX_CONCURRENCY))
    factor = scale if scale is not None else CPU_SCALE if device == "cpu" else 1.0
    return workload if factor == 1 else workload.scaled(factor)


def _popular(workload: Workload, distribution: str | None) -> Workload:
    """With another popularity, which is then in its name."""
    if distribution is None:
        return workload
    popularity = workload.popularity.chosen(distribution)
    return replace(workload, name=f"{workload.name} {distribution}", popularity=popularity)


def _with_share(workload: Workload, share: float) -> Workload:
    """With this share of its adapters for all positions, which is then in its name. Raises OptionInvalid."""
    num_all = workload.num_adapters * share
    if abs(num_all - round(num_all)) > 1e-6:
        raise OptionInvalid(f"--all-shares {share:g}: of {workload.num_adapters} adapters that is {num_all:g}")
    name = f"{workload.name} all {share:g}" if share else workload.name
    return replace(workload, name=name, all_share=share)


def _own_count(workload: Workload, device: str) -> int:
    """`random` has no adapters of its own; here it is about them, too."""
    count = workload.num_adapters or 8
    return min(count, _CPU_MAX_ADAPTERS) if device == "cpu" else count


def in_turn(cells: Sequence[Workload], systems: Sequence[str], repeats: int) -> Iterator[tuple[int, Workload, str]]:
    """(repeat, cell, system): every system one after the other, every second repeat in reverse.

    So drift of the machine's speed affects all systems alike.
    """
    loads = [(cell, system) for cell in cells for system in systems]
    for repeat in range(repeats):
        for cell, system in reversed(loads) if repeat % 2 else loads:
            yield repeat, cell, system
