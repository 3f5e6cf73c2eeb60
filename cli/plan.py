"""`prelude plan`: from a workload and a kind of GPU to pools, memory and network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.model.serving import EngineDtype
    from cluster.local.memory_plan import ModelSizes
    from cluster.planning.plan import Site
    from cluster.planning.workload import Workload

_GBIT = 1e9 / 8


def add_command(commands: Any) -> None:
    """Add `plan` to the command line."""
    text = "Plan a cluster for a workload: pools, GPUs, adapter slots, host memory, network, and their settings."
    command = commands.add_parser(
        "plan", help=text, description=f"{text} See docs/capacity.md for the formulas and their validation."
    )
    command.set_defaults(run=_plan)
    model = command.add_argument_group("the model and the GPUs")
    model.add_argument("--model", type=Path, required=True, metavar="DIR", help="a directory with a config.json")
    model.add_argument("--dtype", choices=("bfloat16", "float16"), help="serving dtype; default: the checkpoint's")
    model.add_argument(
        "--gpu", default="h100-sxm", metavar="NAME", help="a100-80g, l40s, h100-sxm, h200 or b200; default: h100-sxm"
    )
    model.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="GPUs per engine; default: the best of 1, 2, 4, 8"
    )
    model.add_argument(
        "--layout", choices=("auto", "pairs", "unified"), default="auto", help="default: the one with fewer GPUs"
    )
    work = command.add_argument_group("the workload, at its busiest time")
    work.add_argument("--requests-per-s", type=float, required=True, metavar="R")
    work.add_argument("--prompt-tokens", type=int, required=True, metavar="N", help="mean length of prompts")
    work.add_argument("--generated-tokens", type=int, required=True, metavar="N", help="mean length of answers")
    work.add_argument(
        "--shared-prefix",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of a prompt that earlier prompts of its adapter began with; default: 0",
    )
    work.add_argument(
        "--length-cv",
        type=float,
        default=0.8,
        metavar="CV",
        help="standard deviation of prompt lengths over their mean; default: 0.8",
    )
    work.add_argument(
        "--working-set",
        type=int,
        required=True,
        metavar="N",
        help="number of adapters that are requested repeatedly",
    )
    work.add_argument(
        "--adapter",
        action="append",
        metavar="KIND:RANK[:TARGETS][:SHARE]",
        help="such as lora:16, lora:64:attention:0.2, reft:8; repeatable; default: lora:16",
    )
    work.add_argument(
        "--ttft",
        type=float,
        default=1000.0,
        metavar="MS",
        help="time to first token, for 95 %% of the requests; default: 1000",
    )
    work.add_argument("--tpot", type=float, default=50.0, metavar="MS", help="mean time per further token; default: 50")
    site = command.add_argument_group("resources")
    site.add_argument(
        "--kv-gbit",
        type=float,
        metavar="GBIT",
        help="bandwidth of each worker to the others, for KV; default: print what is needed",
    )
    output = command.add_argument_group("output")
    kinds = output.add_mutually_exclusive_group()
    kinds.add_argument(
        "--cluster-yaml", action="store_true", help="print a cluster.yaml, for one host with all the GPUs"
    )
    kinds.add_argument("--helm-values", action="store_true", help="print values for the chart")


def _plan(arguments: argparse.Namespace) -> None:
    from cluster.planning import report, settings
    from cluster.planning.plan import make_plan

    model, site = arguments.model, _site(arguments)
    sizes, workload = _sizes(model, arguments.dtype), _workload(arguments)
    plan, considered = make_plan(workload, sizes, site)
    if arguments.cluster_yaml or arguments.helm_values:
        settings_of = settings.cluster_settings if arguments.cluster_yaml else settings.helm_values
        print(f"# {plan.num_gpus} x {site.gpu.name}: {plan.workers}; by `prelude plan`")
        print(settings.as_yaml(settings_of(plan, workload, sizes, model)), end="")
    else:
        print(report.text(plan, considered, workload, sizes, site))
        print("\n--cluster-yaml and --helm-values print settings; docs/capacity.md has the formulas.")


def _sizes(model: Path, dtype: EngineDtype | None) -> ModelSizes:
    from adapters.errors import BaseModelInvalid
    from cluster.local.memory_plan import ModelSizes

    try:
        sizes = ModelSizes.read(model, dtype)
    except BaseModelInvalid as error:
        raise ConfigError(f"--model: {error}") from error
    if sizes.dtype == "float32":
        raise ConfigError("--model: its dtype is float32, whose speed on GPUs is not known; give --dtype bfloat16")
    return sizes


def _workload(arguments: argparse.Namespace) -> Workload:
    from cluster.planning.workload import AdapterKind, Workload

    return Workload(
        requests_per_s=arguments.requests_per_s,
        prompt_tokens=arguments.prompt_tokens,
        generated_tokens=arguments.generated_tokens,
        ttft_s=arguments.ttft / 1000,
        tpot_s=arguments.tpot / 1000,
        working_set=arguments.working_set,
        kinds=tuple(map(AdapterKind.parsed, arguments.adapter or ["lora:16"])),
        shared_prefix=arguments.shared_prefix,
        length_cv=arguments.length_cv,
    )


def _site(arguments: argparse.Namespace) -> Site:
    from cluster.planning.gpus import GPUS
    from cluster.planning.plan import LAYOUTS, TENSOR_PARALLEL, Site

    name, size, kv_gbit = arguments.gpu.lower(), arguments.tensor_parallel, arguments.kv_gbit
    if name not in GPUS:
        raise ConfigError(f"--gpu {arguments.gpu!r} is not in the table; give the most similar of {', '.join(GPUS)}")
    if size is not None and not 1 <= size <= 1024:
        raise ConfigError(f"--tensor-parallel is {size}; give a number from 1 to 1024")
    if kv_gbit is not None and not 1e-6 <= kv_gbit <= 1e9:
        raise ConfigError(f"--kv-gbit is {kv_gbit:g}; give a positive number, at most 1e9")
    return Site(
        GPUS[name],
        tensor_parallel=TENSOR_PARALLEL if size is None else (size,),
        layouts=LAYOUTS if arguments.layout == "auto" else (arguments.layout,),
        kv_bytes_per_s=None if kv_gbit is None else kv_gbit * _GBIT,
    )
