"""`prelude adapters pin | unpin | prewarm`: control the residency of a revision on running workers."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from adapters.identity import AdapterReference
from cli.adapters.opened import audited, opened_catalog
from cli.adapters.outcome import REFUSED, add_command, failures_end, print_result
from cli.agents import Agents, agents_of
from cluster.errors import ANSWER_MARGIN_S, ERROR_CODE_KEY

if TYPE_CHECKING:
    from adapters.catalog.records import AdapterRevision
    from cluster.config.schema import ClusterConfig
    from cluster.control.control_pb2_grpc import WorkerControlStub

_DEADLINE_S = 60.0

_Call = Callable[["WorkerControlStub"], Awaitable[Any]]
_CallFor = Callable[["AdapterRevision"], _Call]


def add_commands(commands: Any) -> None:
    """Add the commands of this module."""
    for name, run, text in (
        ("pin", _pin, "Load a revision into workers' host memory and protect it from eviction."),
        ("unpin", _unpin, "Let workers evict a pinned revision again."),
        (
            "prewarm",
            _prewarm,
            "Load a revision into workers before its first request; loads that requests wait for come first.",
        ),
    ):
        command = add_command(commands, name, run, text)
        command.add_argument("reference", metavar="REFERENCE", help="name, name@alias, name@rN or name@sha256:…")
        command.add_argument("--worker", metavar="NAME", help="only this worker; default: all that hold adapters")
        if run is not _unpin:
            command.add_argument(
                "--deadline", type=float, default=_DEADLINE_S, metavar="SECONDS", help=f"default: {_DEADLINE_S:g}"
            )
        if run is _prewarm:
            command.add_argument("--tier", choices=("host", "disk"), default="host", help="disk: fetch without loading")


def _pin(arguments: argparse.Namespace) -> None:
    from cluster.control.control_pb2 import PinAdapterRequest

    def call(revision: AdapterRevision) -> _Call:
        request = PinAdapterRequest(
            revision_id=revision.revision_id, pinned=True, deadline_s=arguments.deadline, tenant=revision.tenant
        )
        return lambda stub: stub.PinAdapter(request, timeout=arguments.deadline + ANSWER_MARGIN_S)

    _call_workers(arguments, call, "pin", "pinned")


def _unpin(arguments: argparse.Namespace) -> None:
    from cluster.control.control_pb2 import PinAdapterRequest

    def call(revision: AdapterRevision) -> _Call:
        request = PinAdapterRequest(revision_id=revision.revision_id, pinned=False, tenant=revision.tenant)
        return lambda stub: stub.PinAdapter(request, timeout=_DEADLINE_S + ANSWER_MARGIN_S)

    _call_workers(arguments, call, "unpin", "unpinned")


def _prewarm(arguments: argparse.Namespace) -> None:
    from cluster.control.control_pb2 import TIER_DISK, TIER_HOST, EnsureAdapterRequest

    def call(revision: AdapterRevision) -> _Call:
        tier = TIER_DISK if arguments.tier == "disk" else TIER_HOST
        request = EnsureAdapterRequest(
            revision_id=revision.revision_id, deadline_s=arguments.deadline, tier=tier, prewarm=True
        )
        return lambda stub: stub.EnsureAdapter(request, timeout=arguments.deadline + ANSWER_MARGIN_S)

    _call_workers(arguments, call, "prewarm", "on disk" if arguments.tier == "disk" else "in host memory")


def _call_workers(arguments: argparse.Namespace, call: _CallFor, action: str, done: str) -> None:
    """Resolve the reference, call the workers concurrently, print the results; exit with 1 if one failed."""
    from cluster.config.load import load_cluster_config

    with failures_end(arguments):
        AdapterReference.parse(arguments.reference)
        agents = _agents(load_cluster_config(arguments.config), arguments)
        with opened_catalog(arguments) as catalog:
            revision = catalog.resolve(arguments.reference)
            with audited(arguments, catalog, f"adapter.{action}", revision.full_name) as note:
                seconds, errors = asyncio.run(_call_all(agents, call(revision)))
                errors |= {
                    place: {"code": "not_usable", "message": problem} for place, problem in agents.problems.items()
                }
                failed = f", failed on {', '.join(errors)}" if errors else ""
                note["new"] = f"r{revision.number} {revision.revision_id}{failed}"
    as_json = {
        "name": revision.full_name,
        "number": revision.number,
        "revision": revision.revision_id,
        "workers": {**seconds, **{name: {"error": error} for name, error in errors.items()}},
    }
    print_result(arguments, as_json, [f"{name}: {revision.full_name}@r{revision.number} is {done}" for name in seconds])
    for name, error in errors.items():
        print(f"prelude: {name}: {error['code']}: {error['message']}", file=sys.stderr)
    if errors:
        sys.exit(REFUSED)


def _agents(config: ClusterConfig, arguments: argparse.Namespace) -> Agents:
    """The agents of the workers that hold adapters. Raises ConfigError."""
    names = None if arguments.worker is None else [arguments.worker]
    return agents_of(config, arguments.config, names, holds_adapters=True)


async def _call_all(agents: Agents, call: _Call) -> tuple[dict[str, float], dict[str, dict[str, str]]]:
    """Seconds by worker that succeeded, and errors by worker that failed."""
    answers = await asyncio.gather(*(_call_one(agents, name, call) for name in agents.addresses))
    by_worker = dict(zip(agents.addresses, answers, strict=True))
    return (
        {name: answer for name, answer in by_worker.items() if isinstance(answer, float)},
        {name: answer for name, answer in by_worker.items() if not isinstance(answer, float)},
    )


async def _call_one(agents: Agents, name: str, call: _Call) -> float | dict[str, str]:
    import grpc

    from cluster.control.control_pb2_grpc import WorkerControlStub

    began_at = time.monotonic()
    async with agents.channel(name) as channel:
        try:
            await call(WorkerControlStub(channel))
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            code = metadata.get(ERROR_CODE_KEY) or error.code().name.lower()
            return {"code": str(code), "message": error.details() or f"{agents.addresses[name][1]} gave no details"}
    return round(time.monotonic() - began_at, 4)
