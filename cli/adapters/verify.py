"""`prelude adapters verify`: checks an adapter's directory without a running cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterError, BaseModelInvalid
from cli.adapters.outcome import REFUSED, WRONG_USAGE, fail, noted
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.model.manifest import ExpertsEntry, LoraEntry, ReftEntry
    from adapters.verification.self_check import Deployment, SelfCheck


def add_commands(commands: Any) -> None:
    """Add `verify`."""
    text = (
        "Show what an adapter directory contains, whether it loads here, its size, and whether it computes correctly."
    )
    verify = commands.add_parser(
        "verify",
        help=text,
        description=text,
        epilog="Exit status: 0 if the adapter is fine, 1 if it is refused, not served or fails the check, "
        "2 on wrong usage.",
    )
    verify.add_argument("directory", type=Path, help="the adapter, in a format of docs/adapter-formats.md")
    verify.add_argument("--model", help="the base model, as for `prelude init`; default: that of --config")
    verify.add_argument("--config", type=Path, help="a cluster.yaml for limits and dtype; default: the built-in ones")
    verify.add_argument("--no-model", action="store_true", help="do not run the base model")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> None:
    if arguments.model is None and arguments.config is None:
        message = "name the base model with --model, or a cluster.yaml with --config"
        fail(arguments, WRONG_USAGE, "wrong_usage", message, loads=False)
    try:
        deployment, model_dir = _deployment(arguments)
        from adapters.verification.self_check import check_adapter

        check = check_adapter(arguments.directory, model_dir, deployment, run_model=not arguments.no_model)
    except ConfigError as error:
        fail(arguments, WRONG_USAGE, "wrong_usage", str(error), loads=False)
    except BaseModelInvalid as error:
        fail(arguments, WRONG_USAGE, error.code, str(error), loads=False)
    except AdapterError as error:
        fail(arguments, REFUSED, error.code, str(error), loads=False)
    if arguments.json:
        print(json.dumps(_as_json(check, deployment), indent=2))
    else:
        print("\n".join(_lines(arguments.directory, check, deployment)))
    sys.exit(REFUSED if check.problems or check.not_served else 0)


def _deployment(arguments: argparse.Namespace) -> tuple[Deployment, Path]:
    from adapters.verification.self_check import Deployment
    from cluster.local.named_model import model_directory, say_it

    if arguments.config is None:
        return Deployment(), model_directory(arguments.model, say_it)
    from cluster.config.load import load_cluster_config
    from cluster.open_library import limits_of

    config = load_cluster_config(arguments.config)
    model = model_directory(arguments.model or str(config.model.path), say_it)
    return Deployment(limits_of(config), config.model.dtype), model


def _as_json(check: SelfCheck, deployment: Deployment) -> dict[str, Any]:
    manifest = check.manifest
    return {
        "loads": not check.problems and not check.not_served,
        "not_served": check.not_served,
        "problems": list(check.problems),
        "warnings": list(check.warnings),
        "changes_nothing": check.changes_nothing,
        "revision": check.revision_id,
        "base_model": manifest.base_model,
        "kinds": list(manifest.kinds),
        "positions": manifest.positions,
        "max_rank": manifest.max_rank,
        "layers": list(manifest.layers),
        "target_modules": list(manifest.target_modules),
        "source_dtypes": sorted({e.dtype for each in (manifest.lora, manifest.reft, manifest.experts) for e in each}),
        "num_parameters": manifest.num_parameters,
        "serving_dtype": deployment.dtype,
        "bytes": asdict(check.footprint),
        "model": None if check.model is None else asdict(check.model),
        "model_skipped": check.model_skipped,
    }


def _lines(directory: Path, check: SelfCheck, deployment: Deployment) -> Iterator[str]:
    manifest, limits, size = check.manifest, deployment.limits, check.footprint
    outcome = "FAILS the self-check" if check.problems else "is NOT SERVED" if check.not_served else "loads here"
    yield f"{directory} {outcome}"
    if check.not_served:
        yield f"  not served   {check.not_served}"
    for problem in check.problems:
        yield f"  problem      {problem}"
    for warning in check.warnings:
        label, _, text = noted(warning).partition(": ")
        yield f"  {label}      {text}"
    if check.changes_nothing:
        yield "  note         it changes nothing: every change that it makes is exactly zero"
    yield f"  revision     {check.revision_id}"
    kinds: tuple[tuple[str, Sequence[LoraEntry | ReftEntry | ExpertsEntry], int], ...] = (
        ("LoRA   ", manifest.lora, limits.max_rank),
        ("experts", manifest.experts, limits.max_expert_rank),
        ("ReFT   ", manifest.reft, limits.max_rank),
    )
    for kind, entries, max_rank in kinds:
        if entries:
            ranks = f"rank {_ranges(sorted({entry.rank for entry in entries}))} (at most {max_rank})"
            dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
            yield f"  {kind}      {ranks}, {dtypes}, layers {_ranges(sorted({entry.layer for entry in entries}))}"
    if manifest.target_modules:
        yield f"  projections  {', '.join(manifest.target_modules)}"
    where = "the prompt, its last token included" if manifest.positions == "prefill" else "every token"
    yield f"  positions    {manifest.positions}: {where}"
    yield f"  parameters   {manifest.num_parameters:,}"
    yield "Bytes"
    yield f"  {size.files:>15,}  its weight files (at most {limits.max_bytes:,})"
    yield f"  {size.disk:>15,}  its packed form on a worker's disk: {deployment.dtype}, scales folded in, ranks padded"
    yield f"  {size.host:>15,}  in host memory of each engine process that holds it"
    yield "Self-check"
    if (model := check.model) is None:
        yield f"  model        not run: {check.model_skipped}"
        return
    reference = "peft" if model.reference == "peft" else "the float32 reference"
    yield f"  model        log-probabilities change by up to {model.effect:.3g} against the base model"
    yield (
        f"               under the packed form they are within {model.error:.1e} of {reference} "
        f"(allowed {model.tolerance:.1e})"
    )


def _ranges(numbers: list[int]) -> str:
    """Ascending integers in short: `0-3, 7`."""
    from adapters.model.number_ranges import ranges_of

    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges_of(numbers))
