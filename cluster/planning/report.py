"""Prints a plan."""

from collections.abc import Mapping, Sequence

from cluster.host_memory import gib
from cluster.local.memory_plan import ModelSizes
from cluster.planning.adapter_memory import ENGINE_SHARED_BYTES
from cluster.planning.plan import MAX_NODE_GPUS, Layout, Plan, Site
from cluster.planning.pools import Pool
from cluster.planning.speed import MEASURED_GPU
from cluster.planning.workload import Workload


def text(
    plan: Plan,
    considered: Mapping[Layout, Plan | str],
    workload: Workload,
    sizes: ModelSizes,
    site: Site,
) -> str:
    """Tables and the arithmetic, to be read on a terminal."""
    gpu = site.gpu
    lines = [
        f"{plan.num_gpus} x {gpu.name}: {plan.workers}",
        "",
        *_table(
            [
                ("pool", "workers", "GPUs each", "requests/s each", "load", "in flight", "KV tokens", "limited by"),
                *(_row(pool) for pool in plan.pools),
            ]
        ),
        "",
        *_table(
            [
                ("objective", "wanted", "planned"),
                ("first token, 95 %", f"{_ms(workload.ttft_s)}", f"{_ms(plan.ttft_s)}"),
                ("each further token, mean", f"{_ms(workload.tpot_s)}", f"{_ms(plan.tpot_s)}"),
            ]
        ),
        "",
        *_table([("per worker that holds adapters", ""), *_adapter_rows(plan, workload)]),
    ]
    if plan.kv is not None:
        lines += ["", *_table([("KV from prefill to decode", ""), *_kv_rows(plan, site)])]
    lines += ["", "considered"]
    for layout, each in considered.items():
        lines.append(f"  {layout}: {each if isinstance(each, str) else f'{each.num_gpus} GPUs, {each.workers}'}")
    lines += ["", *(f"- {note}" for note in notes(plan, workload, sizes, site))]
    return "\n".join(lines)


def notes(plan: Plan, workload: Workload, sizes: ModelSizes, site: Site) -> list[str]:
    """The assumptions behind the numbers."""
    found = [f"Weights are {gib(sizes.weight_bytes)}, by {sizes.weights_from}."]
    if site.gpu.name == MEASURED_GPU:
        found.append("Shares of the GPU's peaks were measured on this kind of GPU, on two models without quantisation.")
    else:
        found.append(
            f"Shares of the GPU's peaks were measured on {MEASURED_GPU.upper()}s and are assumed here: measure one "
            "worker (`prelude bench matrix adapter-tax`)."
        )
    if any(pool.tensor_parallel > 1 for pool in plan.pools):
        found.append("What tensor parallelism costs is assumed: it was not measured on GPUs.")
    if any(pool.tensor_parallel > MAX_NODE_GPUS for pool in plan.pools):
        found.append(f"A worker has the GPUs of one server: this plan needs servers with more than {MAX_NODE_GPUS}.")
    if plan.cached_share < workload.shared_prefix - 1e-3:
        found.append(
            f"Prefix caches have room for {plan.cached_share:.0%} of the prompts, less than the "
            f"{workload.shared_prefix:.0%} that are shared: KV of the working set's prefixes is larger."
        )
    for pool in plan.pools:
        if pool.num_workers == 1:
            found.append(f"The {pool.role} pool has one worker: nobody takes over when it ends or is replaced.")
    if sizes.base.experts is not None:
        found.append("The speed of mixtures of experts was not measured at all.")
    return found


def _row(pool: Pool) -> tuple[str, ...]:
    return (
        pool.role,
        str(pool.num_workers),
        str(pool.tensor_parallel),
        f"{pool.requests_per_s:.3g} of {pool.most_per_s:.3g}",
        f"{pool.load:.0%}",
        f"{pool.batch:.0f}" if pool.batch else "-",
        str(pool.memory.max_tokens),
        pool.limit,
    )


def _adapter_rows(plan: Plan, workload: Workload) -> list[tuple[str, str]]:
    sizes = plan.adapter_sizes
    return [
        ("slots", f"{plan.slots} and one for the base model, {gib(sizes.slot)} each, rank {workload.max_rank}"),
        ("an adapter", f"{gib(sizes.mean)} in the mean, {gib(sizes.largest)} the largest"),
        ("residency.host_bytes", gib(plan.host_bytes)),
        ("/dev/shm", gib(plan.host_bytes + ENGINE_SHARED_BYTES)),
    ]


def _kv_rows(plan: Plan, site: Site) -> list[tuple[str, str]]:
    kv = plan.kv
    assert kv is not None
    link = "the link has" if site.kv_bytes_per_s is not None else "a worker's link needs"
    return [
        ("a prompt", f"{gib(kv.bytes_per_prompt)}, in {_ms(kv.transfer_s)}"),
        ("together", _gbit(kv.total_bytes_per_s)),
        ("out of a prefill worker", _gbit(kv.prefill_bytes_per_s)),
        ("into a decode worker", _gbit(kv.decode_bytes_per_s)),
        (link, _gbit(kv.link_bytes_per_s)),
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s"
