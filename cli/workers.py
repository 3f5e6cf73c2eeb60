"""`prelude workers list | drain | undrain | set-role`: the workers of a running cluster, and what they do."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from cli.adapters.opened import note_outcomes
from cli.adapters.outcome import REFUSED, add_command, add_group, print_result
from cli.agents import Agents, agents_of
from cli.bench.arguments import positive_float
from cluster.errors import ANSWER_MARGIN_S

if TYPE_CHECKING:
    from cluster.control.control_pb2_grpc import WorkerControlStub

_TIMEOUT_S = 5.0
_AGAIN_S = 0.05

_Call = Callable[["WorkerControlStub", str], Awaitable[dict[str, Any]]]


def add_commands(commands: Any) -> None:
    """Add `workers` and its subcommands to the command line."""
    text = "List the workers of a running cluster, drain and undrain them, change their role."
    subcommands = add_group(commands, "workers", text)
    add_command(subcommands, "list", _list, "Show the state and load of every worker.")
    drain = add_command(
        subcommands,
        "drain",
        _drain,
        "Have workers take no more requests, and wait until those in flight have finished. They stay drained until "
        "`undrain`, or until their agent is started again.",
    )
    drain.add_argument(
        "--deadline", type=positive_float, metavar="SECONDS", help="default: the worker's drain_timeout_s"
    )
    undrain = add_command(subcommands, "undrain", _undrain, "Let drained workers take requests again.")
    set_role = add_command(
        subcommands,
        "set-role",
        _set_role,
        "Drain workers, one by one, have their engines go on in another role, and wait until they take requests; "
        "needs `role_changes`.",
    )
    set_role.add_argument("role", choices=("prefill", "decode"))
    set_role.add_argument(
        "--even-last", action="store_true", help="also if no other worker of its role takes requests: none is answered"
    )
    for command in (drain, undrain, set_role):
        command.add_argument("names", metavar="NAME", nargs="+", help="a worker")


def _list(arguments: argparse.Namespace) -> None:
    from cluster.control import control_pb2 as pb
    from cluster.discovery.descriptions import metrics_address

    agents = _agents(arguments, None)

    async def call(stub: WorkerControlStub, name: str) -> dict[str, Any]:
        description = await stub.Describe(pb.DescribeRequest(), timeout=_TIMEOUT_S)
        stream = stub.WatchState(pb.WatchStateRequest(), timeout=_TIMEOUT_S)
        try:
            state = await stream.read()
        finally:
            stream.cancel()
        if not isinstance(state, pb.WorkerState):  # the agent ended the stream
            return {"error": {"code": "unavailable", "message": "its agent is stopping"}}
        return {
            "address": agents.addresses[name][1],
            "metrics": metrics_address(agents.addresses[name][1], description),
            "role": pb.Role.Name(description.role).removeprefix("ROLE_").lower(),
            "state": _state_of(state),
            "reason": "" if state.draining else state.reason,
            "not_warm_with": list(state.not_warm_with),
            "running_requests": state.load.running_requests,
            "queued_requests": state.load.queued_requests,
            "used_kv_tokens": state.load.used_kv_tokens,
            "max_kv_tokens": state.load.max_kv_tokens,
        }

    def line(name: str, worker: dict[str, Any]) -> str:
        load = (
            f"{worker['running_requests']} running, {worker['queued_requests']} queued, "
            f"{worker['used_kv_tokens']} of {worker['max_kv_tokens']} KV tokens"
        )
        cold = f"not warm with {', '.join(worker['not_warm_with'])}" if worker["not_warm_with"] else ""
        reason = f" ({worker['reason'] or cold})" if worker["reason"] or cold else ""
        metrics = f", metrics {worker['metrics']}" if worker["metrics"] else ""
        return f"{name}  {worker['role']}  {worker['state']}{reason}  {load}  agent {worker['address']}{metrics}"

    _print_answers(arguments, asyncio.run(_call_all(agents, call)), line)


def _state_of(state: Any) -> str:
    from cluster.control import control_pb2 as pb

    if state.draining:
        return "draining" if state.load.running_requests + state.load.queued_requests else "drained"
    if state.ready:
        return "ready"
    return pb.EngineState.Name(state.engine_state).removeprefix("ENGINE_STATE_").lower()


def _drain(arguments: argparse.Namespace) -> None:
    from cluster.config.load import load_cluster_config
    from cluster.control import control_pb2 as pb

    config = load_cluster_config(arguments.config)

    async def call(stub: WorkerControlStub, name: str) -> dict[str, Any]:
        deadline_s = arguments.deadline or config.drain_timeout_of(name)
        answer = await stub.Drain(pb.DrainRequest(deadline_s=deadline_s), timeout=deadline_s + ANSWER_MARGIN_S)
        if not answer.idle:
            text = f"it has requests in flight after {deadline_s:g} s; it takes no new ones until `undrain`"
            return {"error": {"code": "not_idle", "message": text}}
        return {"state": "drained"}

    _change_workers(arguments, "worker.drain", call, lambda name, _: f"{name} is drained")


def _undrain(arguments: argparse.Namespace) -> None:
    from cluster.control import control_pb2 as pb

    async def call(stub: WorkerControlStub, _name: str) -> dict[str, Any]:
        answer = await stub.Undrain(pb.UndrainRequest(), timeout=_TIMEOUT_S)
        return {"was_draining": answer.was_draining}

    def line(name: str, answer: dict[str, Any]) -> str:
        return f"{name} takes requests{'' if answer['was_draining'] else ', as before'}"

    _change_workers(arguments, "worker.undrain", call, line)


def _set_role(arguments: argparse.Namespace) -> None:
    from cluster.config.load import load_cluster_config
    from cluster.control import control_pb2 as pb

    config = load_cluster_config(arguments.config)
    one_at_a_time = asyncio.Lock()

    async def call(stub: WorkerControlStub, name: str) -> dict[str, Any]:
        deadline_s = config.drain_timeout_of(name)
        request = pb.ChangeRoleRequest(
            role=f"ROLE_{arguments.role.upper()}", deadline_s=deadline_s, even_last=arguments.even_last
        )
        async with one_at_a_time:
            began = time.monotonic()
            await stub.ChangeRole(request, timeout=deadline_s + ANSWER_MARGIN_S)
            drained = time.monotonic()
            timeout_s = config.engine_of(name).start_timeout_s  # an engine that does not switch is started again
            try:
                async with asyncio.timeout(timeout_s):
                    await _serves_as(stub, request.role, alone=arguments.even_last)
            except TimeoutError:
                text = f"it is drained, but after {timeout_s:g} s no {arguments.role} worker that takes requests"
                return {"error": {"code": "not_ready", "message": text}}
        return {"role": arguments.role, "drained_s": drained - began, "ready_s": time.monotonic() - drained}

    def line(name: str, answer: dict[str, Any]) -> str:
        return (
            f"{name} takes requests as a {arguments.role} worker: drained after {answer['drained_s']:.1f} s, "
            f"ready {answer['ready_s']:.1f} s later"
        )

    _change_workers(arguments, "worker.set_role", call, line)


async def _serves_as(stub: WorkerControlStub, role: int, *, alone: bool) -> None:
    """Wait until the worker's agent of this role is there and takes requests, or would if it had a partner."""
    import grpc

    from cluster.control import control_pb2 as pb

    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the agent before it ends
            if (await stub.Describe(pb.DescribeRequest(), wait_for_ready=True)).role == role:
                async for state in stub.WatchState(pb.WatchStateRequest(), wait_for_ready=True):
                    is_there = state.ready or (alone and state.engine_state == pb.ENGINE_STATE_UP)
                    if is_there and not state.draining:
                        return
        await asyncio.sleep(_AGAIN_S)


def _change_workers(
    arguments: argparse.Namespace, action: str, call: _Call, line: Callable[[str, dict[str, Any]], str]
) -> None:
    """Call the agents of the workers named and print the answers. Exits with 1 on a failure.

    The audit log is written last, since workers can be drained while the catalog is unreachable.
    """
    agents = _agents(arguments, arguments.names)
    outcomes = dict.fromkeys([*agents.addresses, *agents.problems], "interrupted")
    try:
        answers = asyncio.run(_call_all(agents, call))
        outcomes |= {name: answer["error"]["code"] if "error" in answer else "done" for name, answer in answers.items()}
        _print_answers(arguments, answers, line)
    finally:
        note_outcomes(arguments, action, outcomes)


def _agents(arguments: argparse.Namespace, names: list[str] | None) -> Agents:
    """The agents of these workers; None: of all."""
    from cluster.config.load import load_cluster_config

    return agents_of(load_cluster_config(arguments.config), arguments.config, names)


def _print_answers(
    arguments: argparse.Namespace, answers: dict[str, dict[str, Any]], line: Callable[[str, dict[str, Any]], str]
) -> None:
    """Exits with 1 if one is an error."""
    failed = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    lines = [line(name, answer) for name, answer in answers.items() if name not in failed]
    print_result(arguments, {"workers": answers}, lines)
    for name, error in failed.items():
        print(f"prelude: {name}: {error['code']}: {error['message']}", file=sys.stderr)
    if failed:
        sys.exit(REFUSED)


async def _call_all(agents: Agents, call: _Call) -> dict[str, dict[str, Any]]:
    """The answers of the agents, called concurrently, and the errors of those that cannot be called."""
    answers = await asyncio.gather(*(_call_one(agents, name, call) for name in agents.addresses))
    errors = {
        place: {"error": {"code": "not_usable", "message": problem}} for place, problem in agents.problems.items()
    }
    return dict(zip(agents.addresses, answers, strict=True)) | errors


async def _call_one(agents: Agents, name: str, call: _Call) -> dict[str, Any]:
    import grpc

    from cluster.control.control_pb2_grpc import WorkerControlStub

    async with agents.channel(name) as channel:
        try:
            return await call(WorkerControlStub(channel), name)
        except grpc.aio.AioRpcError as error:
            details = error.details() or f"{agents.addresses[name][1]} gave no details"
            return {"error": {"code": error.code().name.lower(), "message": details}}
