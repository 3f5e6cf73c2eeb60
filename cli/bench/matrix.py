"""`prelude bench matrix`: systems beside each other. Imports of engines wait for the run."""

import argparse
from typing import Any

from bench.matrix.options import DURATION_S, SLO_MS, SYSTEMS, Options
from bench.matrix.plan import MATRICES, cells_of, lora_rank_of, matrix_named
from cli.bench.arguments import (
    add_engines,
    add_json,
    not_negative_float,
    numbers,
    positive,
    positive_float,
    recorded_command,
    say,
)
from cli.bench.load import add_distribution, objective, objectives


def add_command(benchmarks: Any) -> None:
    """Add `matrix` to the benchmarks."""
    text = "Start stock SGLang and Prelude side by side and run workloads on them in turn: ratios, goodput."
    matrix = benchmarks.add_parser("matrix", help=text, description=text)
    matrix.add_argument(
        "names", nargs="*", default=["pioneer-sweep"], metavar="NAME",
        help=f"a workload of `prelude bench load`, or one of {', '.join(MATRICES)}; default: pioneer-sweep",
    )  # fmt: skip
    matrix.add_argument("--systems", type=systems_named, help=f"any of {','.join(SYSTEMS)}; default: the matrix's")
    matrix.add_argument("--gpus", type=positive, default=1, metavar="N", help="GPUs per system; default: 1")
    matrix.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs per engine; default: 1")
    matrix.add_argument("--slots", type=positive, help="adapter slots of each engine; default: the matrix's, 32")
    matrix.add_argument(
        "--through", choices=("engines", "router"),
        help="send requests to Prelude's engines directly, or to whole clusters behind a router; default: engines, for "
        "`cold` router",
    )  # fmt: skip
    matrix.add_argument(
        "--host-adapters", type=positive, metavar="N",
        help="adapters that fit in the host memory of a cluster's worker; default: all, for `cold` 28",
    )  # fmt: skip
    add_engines(matrix)
    matrix.add_argument(
        "--adapters", type=numbers, metavar="N,…", help="numbers of adapters in use; default: the workload's"
    )
    matrix.add_argument(
        "--all-shares", type=_shares, default=(), metavar="SHARE,…",
        help="such as 0,0.5,1: each workload with these shares of its adapters at all positions; default: 0",
    )  # fmt: skip
    add_distribution(matrix)
    matrix.add_argument(
        "--concurrency", type=positive, help="closed loop; default: the workload's, on a CPU at most 16"
    )
    matrix.add_argument(
        "--scale", type=positive_float, help="factor for prompt and answer lengths; default: 1, on a CPU 0.125"
    )
    matrix.add_argument(
        "--duration-s", type=positive_float, metavar="S", help="minimum duration of each load; default: 60, on a CPU 4"
    )
    matrix.add_argument(
        "--repeats", type=positive, default=2, help="repeats, every second one in reverse order; default: 2"
    )
    matrix.add_argument(
        "--goodput", nargs="+", type=objective, default=[], metavar="KEY:MS",
        help="objectives; default: ttft:500 tpot:50, on a CPU ttft:2000 tpot:200",
    )  # fmt: skip
    add_json(matrix)
    matrix.set_defaults(run=_run)


def options_of(arguments: argparse.Namespace) -> Options:
    """What the command line asks for. Raises BenchError."""
    matrices = [matrix_named(name) for name in dict.fromkeys(arguments.names)]
    device = arguments.device
    systems = arguments.systems or {name for matrix in matrices for name in matrix.systems}
    host_adapters = arguments.host_adapters or min(
        (each.host_adapters for each in matrices if each.host_adapters), default=None
    )
    cells = cells_of(
        matrices,
        device=device,
        adapters=arguments.adapters or (),
        concurrency=arguments.concurrency,
        scale=arguments.scale,
        distribution=arguments.lora_request_distribution,
        all_shares=arguments.all_shares,
    )
    return Options(
        cells=cells,
        systems=tuple(name for name in SYSTEMS if name in systems),
        slo_ms=objectives(arguments.goodput) or SLO_MS[device],
        duration_s=arguments.duration_s or DURATION_S[device],
        repeats=arguments.repeats,
        to=matrices[0].to,
        num_slots=arguments.slots or max(matrix.num_slots for matrix in matrices),
        lora_rank=arguments.lora_rank or lora_rank_of(cells),
        model=arguments.model,
        device=device,
        num_gpus=arguments.gpus,
        tensor_parallel=arguments.tensor_parallel,
        through=arguments.through or ("router" if host_adapters else "engines"),
        host_adapters=host_adapters,
        engine_arguments=arguments.engine_arguments,
    )


def _run(arguments: argparse.Namespace) -> None:
    from bench.matrix.run import run

    run(options_of(arguments), recorded_command(), arguments.json, say)


def _shares(text: str) -> tuple[float, ...]:
    """Raises argparse.ArgumentTypeError."""
    shares = tuple(sorted({not_negative_float(word) for word in text.split(",")}))
    if shares[-1] > 1:
        raise argparse.ArgumentTypeError(f"{shares[-1]:g} is no share, which is at most 1")
    return shares


def systems_named(text: str) -> tuple[str, ...]:
    """Raises argparse.ArgumentTypeError."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(SYSTEMS):
        raise argparse.ArgumentTypeError(
            f"unknown system {', '.join(sorted(unknown))}; choose from {', '.join(SYSTEMS)}"
        )
    return names
