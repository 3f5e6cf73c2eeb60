"""`prelude tenants list | delete`: list tenants, and delete one with everything that it has, verified."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from adapters.errors import AccessNotFound
from adapters.identity import split_adapter_name
from cli.adapters.opened import audited, opened_catalog, opened_library
from cli.adapters.outcome import REFUSED, add_command, add_group, print_result
from cli.agents import Agents, agents_of
from cli.bench.arguments import not_negative_float
from cli.trainer import Asking, asking_trainer, refusal_in
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.catalog.sql.tenants import RemovedTenant
    from adapters.library import AdapterLibrary
    from cluster.config.schema import ClusterConfig
    from cluster.control.control_pb2_grpc import WorkerControlStub

_CALL_TIMEOUT_S = 5.0
_RETRY_S = 0.5
_WAIT_S = 60.0
_BUSY = 429  # something of the tenant's is computed, pushed or sampled

OfTenant = Callable[[set[str]], set[str]]  # those of a worker's revisions that were the tenant's; blocking


def add_commands(commands: Any) -> None:
    """Add `tenants` and its subcommands to the command line."""
    text = "List tenants, or delete one with all its adapters, keys and grants."
    subcommands = add_group(commands, "tenants", text)
    add_command(subcommands, "list", _list, "List tenants with the numbers of their adapters, keys and grants.")
    text = (
        "Delete a tenant's adapters with their history, its keys and its grants, evict its revisions from workers, "
        "remove what it has at the trainer, and show that nothing is left. This cannot be undone. The audit log and "
        "`prelude usage` keep what the tenant did."
    )
    delete = add_command(subcommands, "delete", _delete, text)
    delete.add_argument("tenant", metavar="TENANT")
    delete.add_argument("--yes", action="store_true", help="required, because this cannot be undone")
    delete.add_argument(
        "--without-workers", action="store_true", help="do not contact workers; only if none is running"
    )
    delete.add_argument(
        "--wait", type=not_negative_float, default=_WAIT_S, metavar="SECONDS",
        help=f"how long to wait for requests that use its adapters; default: {_WAIT_S:g}",
    )  # fmt: skip


def _list(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        found = catalog.tenants.list()
    as_json = [
        {
            "name": each.name,
            "created_at": each.created_at,
            "adapters": each.num_adapters,
            "keys": each.num_keys,
            "grants": each.num_grants,
        }
        for each in found
    ]
    lines = [
        f"{each.name}  {each.num_adapters} adapters, {each.num_keys} keys, {each.num_grants} grants" for each in found
    ]
    print_result(arguments, as_json, lines)


def _delete(arguments: argparse.Namespace) -> None:
    from cluster.config.load import load_cluster_config

    tenant = arguments.tenant
    config = load_cluster_config(arguments.config)
    if not arguments.yes:
        raise ConfigError(f"this deletes all that {tenant!r} has and cannot be undone; say so with --yes")
    _check_not_configured(config, arguments)
    agents = None if arguments.without_workers else _agents(config, arguments)
    trainer = asking_trainer(config, arguments.config)
    with opened_library(arguments) as library:
        with audited(library.catalog, "tenant.delete", tenant):
            auth = config.router.auth
            removed = _removed(library, tenant, auth is not None and bool(auth.oidc), trainer)
        # What an earlier run has left is known only as what no adapter has any more, whosever it was.
        of_tenant = library.catalog.tenants.removed if removed.again else set(removed.revision_ids).intersection
        in_workers = asyncio.run(_evict_all(agents, of_tenant, arguments.wait))
        proof: dict[str, Any] = {
            "catalog": library.catalog.tenants.remains(tenant),
            "store": _in_store(library, removed.revision_ids),
            "workers": in_workers,
            "trainer": trainer and _left_at(trainer, tenant, f"{tenant}#{removed.generation}", arguments.wait),
        }
    revisions = len(removed.revision_ids)
    as_json = {
        "tenant": tenant,
        "removed": {
            "adapters": removed.num_adapters,
            "alias_moves": removed.num_alias_moves,
            "keys": removed.num_keys,
            "grants": removed.num_grants,
            "revisions": revisions,
        },
        "next_cache_namespace": f"{tenant}#{removed.generation}",
        "left": proof,
    }
    is_left = any([*proof["catalog"].values(), proof["store"], *in_workers.values(), proof["trainer"]])
    looked_for = "all revisions without an adapter" if removed.again else f"{revisions} revisions"
    print_result(arguments, {**as_json, "nothing_left": not is_left}, _lines(as_json, f"{looked_for} looked for"))
    if is_left:
        print(f"prelude: something of {tenant} is left; run the command again when that is mended", file=sys.stderr)
        sys.exit(REFUSED)


def _removed(library: AdapterLibrary, tenant: str, has_tokens: bool, trainer: Asking | None) -> RemovedTenant:
    try:
        return library.remove_tenant(tenant, has_tokens=has_tokens)
    except AccessNotFound as unknown:  # by a catalog that was restored, perhaps, but not by the trainer
        if trainer is None or tenant not in _tenants_at(trainer, unknown):
            raise
        return library.remove_tenant(tenant, has_tokens=True)


def _tenants_at(trainer: Asking, unknown: AccessNotFound) -> Collection[str]:
    """Raises AccessNotFound if the trainer does not say."""
    try:
        status, answer = trainer("GET", "/tenants")
    except ConnectionError as problem:
        raise AccessNotFound(f"{unknown}; the trainer may have something of it, but {problem}") from problem
    return answer["tenants"] if status == 200 else ()


def _lines(result: dict[str, Any], looked_for: str) -> list[str]:
    removed, left = result["removed"], result["left"]
    tables = ", ".join(f"{number} in {table}" for table, number in left["catalog"].items())
    lines = [
        f"{result['tenant']}: removed {removed['adapters']} adapters with {removed['alias_moves']} moves of aliases, "
        f"{removed['keys']} keys, {removed['grants']} grants, {removed['revisions']} revisions that nobody else has",
        f"catalog: rows that name it: {tables}",
        f"store: {looked_for}, {len(left['store'])} found",
    ]
    for name, found in left["workers"].items():
        shown = found if isinstance(found, str) else f"{len(found)} found"
        lines.append(f"{name}: {looked_for} in memory and on disk, {shown}")
    if not left["workers"]:
        lines.append("workers: not looked at")
    if left["trainer"] is not None:
        lines.append(f"trainer: models, checkpoints and notes of samples, {left['trainer'] or 'none found'}")
    lines.append(
        f"prefix caches: no request finds KV of its prompts; another {result['tenant']} gets "
        f"{result['next_cache_namespace']}"
    )
    return [*lines, "audit log and usage: kept; they show what the tenant's keys did"]


def _check_not_configured(config: ClusterConfig, arguments: argparse.Namespace) -> None:
    for name in config.adapters:
        if split_adapter_name(name)[0] == arguments.tenant:
            raise ConfigError(f"{arguments.config}: adapters.{name} would be imported again; remove it there first")


def _agents(config: ClusterConfig, arguments: argparse.Namespace) -> Agents:
    try:
        return agents_of(config, arguments.config, None, holds_adapters=True)
    except ConfigError as error:
        raise ConfigError(f"{error}; if no worker runs, say --without-workers") from error


def _in_store(library: AdapterLibrary, revision_ids: Collection[str]) -> list[str]:
    """Those that the store has and no adapter. Others may have imported the same content meanwhile."""
    found = [each for each in revision_ids if library.store.exists(each)]
    return sorted(set(found) - set(library.catalog.tenants.still_in_catalog(found)))


def _left_at(trainer: Asking, tenant: str, kept: str, wait_s: float) -> str:
    """Remove what tenants of this name have at the trainer, but for `kept`; why some is left, empty if none is."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            status, answer = trainer("DELETE", f"/tenants/{quote(tenant)}?kept={quote(kept)}")
        except ConnectionError as problem:
            return f"not known: {problem}"
        if status < 400:
            return ""
        if status != _BUSY or time.monotonic() > deadline:
            return f"left: {refusal_in(status, answer)}"
        time.sleep(_RETRY_S)


async def _evict_all(agents: Agents | None, of_tenant: OfTenant, wait_s: float) -> dict[str, list[str] | str]:
    """The revisions that each worker still has; a text where that is unknown."""
    if agents is None:
        return {}
    found = await asyncio.gather(*(_evict(agents, name, of_tenant, wait_s) for name in agents.addresses))
    problems = {place: f"not known: {problem}" for place, problem in agents.problems.items()}
    return dict(zip(agents.addresses, found, strict=True)) | problems


async def _evict(agents: Agents, name: str, of_tenant: OfTenant, wait_s: float) -> list[str] | str:
    import grpc

    from cluster.control.control_pb2_grpc import WorkerControlStub

    deadline = time.monotonic() + wait_s
    async with agents.channel(name) as channel:
        stub = WorkerControlStub(channel)
        try:
            while held := await _held(stub, of_tenant):
                for revision_id in held:
                    await _evict_one(stub, revision_id)
                if time.monotonic() > deadline:
                    return sorted(await _held(stub, of_tenant))
                await asyncio.sleep(_RETRY_S)
        except grpc.aio.AioRpcError as error:
            return f"not known: {error.code().name.lower()}, {error.details()}"
        except ConnectionError as error:
            return f"not known: {error}"
    return []


async def _evict_one(stub: WorkerControlStub, revision_id: str) -> None:
    """Release the pin of a push and evict, unless a request uses the revision."""
    import grpc

    from cluster.control import control_pb2 as pb

    unpin = pb.PinAdapterRequest(revision_id=revision_id, pinned=False)
    await stub.PinAdapter(unpin, timeout=_CALL_TIMEOUT_S)
    try:
        evict = pb.EvictAdapterRequest(revision_id=revision_id, from_disk=True)
        await stub.EvictAdapter(evict, timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # which says that it is in use
            raise


async def _held(stub: WorkerControlStub, of_tenant: OfTenant) -> set[str]:
    """Those of the tenant's revisions that a worker has, in memory or on disk, by the whole snapshot of its state."""
    from cluster.control import control_pb2 as pb
    from cluster.control.bounds import MIN_HEARTBEAT_S

    held: dict[str, set[str]] = {"resident": set(), "on_disk": set(), "in_memory_only": set()}
    stream = stub.WatchState(pb.WatchStateRequest(heartbeat_s=MIN_HEARTBEAT_S), timeout=_CALL_TIMEOUT_S)
    try:
        async for state in stream:
            delta: Any = state.residency
            if not delta.snapshot and not delta.ListFields():  # sent behind the last message of the snapshot
                return await asyncio.to_thread(of_tenant, set().union(*held.values()))
            for name, gone in (
                ("resident", "evicted"),
                ("on_disk", "off_disk"),
                ("in_memory_only", "not_in_memory_only"),
            ):
                held[name].update(getattr(delta, name))
                held[name].difference_update(getattr(delta, gone))
    finally:
        stream.cancel()
    raise ConnectionError("its state ended before all of it was read")
