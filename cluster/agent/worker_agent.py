"""The agent that every worker runs: it supervises one engine and reports the worker's state.

Roles extend it: prefill workers load adapters and warm pairs, decode workers wait to be warmed, unified workers load
adapters and warm themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from cluster.agent.engine_metrics import EngineMetrics
from cluster.agent.engine_spec import PEER_ROLES, base_model_of, base_weights_of, fitted_spec, guarded
from cluster.agent.peers import Peer, Peers
from cluster.agent.worker_metrics import WorkerMetrics
from cluster.config.fields import MAX_DURATION_S
from cluster.config.schema import ClusterConfig
from cluster.config.tracing import trace_settings
from cluster.config.workers import EngineConfig
from cluster.control import control_pb2 as pb
from cluster.control.http import serve_worker_http
from cluster.control.service import serve_control
from cluster.control.transport import Transport
from cluster.control.worker import AdapterOperations
from cluster.control.worker_state import WorkerStateHub
from cluster.errors import ConfigError, RoleChangeRefused, StartError, WorkerStopping
from engine.client import EngineClient
from engine.errors import EngineError, EngineUnreachable
from engine.hang_watch import Timeouts
from engine.hooks.kv.peers import write_found_peers
from engine.hooks.ledger import hooks_for
from engine.pin import SGLANG_VERSION
from engine.supervisor import EngineGivenUp, EngineSnapshot, EngineStatus, EngineSupervisor
from process.certificates.expiry import export_expiry
from process.exhaustion import raise_open_files
from process.lifetime import stop_signal
from process.log import Stopwatch
from process.tracing import start_tracing
from process.tracing.span import Tracing

log = logging.getLogger(__name__)

_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "unified": pb.ROLE_UNIFIED}
_ENGINE_STATES = {
    EngineStatus.STARTING: pb.ENGINE_STATE_STARTING,
    EngineStatus.UP: pb.ENGINE_STATE_UP,
    EngineStatus.DOWN: pb.ENGINE_STATE_DOWN,
    EngineStatus.STOPPED: pb.ENGINE_STATE_STOPPED,
}
# Of hang_timeout_s, for a scheduler that computes, but finishes no iteration of its loop and runs no compiler. The
# longest that is legitimate is, on GPUs, a kernel that Triton compiles; on CPUs, a batch.
_COMPUTE_TIMEOUTS = {"cuda": 1, "cpu": 15}
_BATCH_TIMEOUTS = 30  # the same for one whole batch; the only bound before the engine is warm
_LOAD_POLL_IDLE_S = 1.0
_STOP_LIMIT_S = 12.0  # for the shutdown after the drain; the local supervisor allows 15 s
_LOAD_POLL_BUSY_S = 0.2
_OPEN_FILES = 65_536  # as SGLang wants them; its engine inherits the limit
_IDLE_FOR_S = 1.0  # without load, after which an engine counts as drained


def _hang_timeouts(engine: EngineConfig) -> Timeouts | None:
    if engine.hang_timeout_s is None:
        return None
    hang_s = engine.hang_timeout_s
    return Timeouts(hang_s, _BATCH_TIMEOUTS * hang_s, _COMPUTE_TIMEOUTS[engine.device] * hang_s)


class WorkerAgent:
    """One worker. Subclasses set `role` and implement `is_warm_with` or, without peers, `why_not_warm`."""

    role: str
    peer_role: str | None  # of the workers at the other end of KV transfers
    adapters: AdapterOperations | None = None  # set by roles whose engine has adapter slots

    def __init__(self, config: ClusterConfig, name: str, scratch: Path) -> None:
        self.config = config
        self.name = name
        self.scratch = scratch
        self.worker = config.workers[name]
        self.base = base_model_of(config)
        self.transport = Transport.of(config, name)
        self.spec = guarded(fitted_spec(config, name, scratch / "engine", self.base), self.transport, name)
        self._base_weights = base_weights_of(self.spec)
        self.hub = WorkerStateHub()
        self.metrics = WorkerMetrics(name, self.role)
        export_expiry(self.metrics.registry, lambda: self.transport.validity)
        self.tracing = Tracing()  # on in `run`, if it is configured
        self.peers = Peers(
            config,
            self.peer_role,
            self.transport,
            on_change=self.reconsider,
            on_leave=self.peer_left,
            on_hosts=self._peer_hosts_changed,
        )
        cache = config.residency.disk_directory
        self.adapters_folder = cache / name if cache is not None else scratch / "adapters"  # of workers that have some
        self._agent_id = secrets.token_hex(8)
        self._engine_metrics = EngineMetrics(self._ask_for_metrics)
        self.engine: EngineClient  # created in `run`, where the event loop runs
        self._changed = asyncio.Event()
        self._ready_incarnation = ""
        self._warm_incarnation = ""  # the last one that has become ready, also if it is suspected now
        self._switched_incarnation = ""  # of an engine that was warm in its role before
        self._suspicion = ""  # why an engine that is up should get no requests
        self._is_stopping = False
        self._num_drains = 0  # that were begun
        # Creates the worker's agent of another role; None: its role is fixed.
        self.successor: Callable[[str], WorkerAgent] | None = None
        self._next_role: asyncio.Queue[str] = asyncio.Queue()  # has the one that the worker is to have
        self._change: Stopwatch | None = None  # of a change of role, until the worker is ready in the new one
        self._supervisor: EngineSupervisor  # with the next two, taken over from the agent before this one, if any
        self._supervising: asyncio.Task[None] | None = None
        self._stop: asyncio.Future[signal.Signals]

    # Extended by roles.

    def is_warm_with(self, peer: Peer) -> bool:
        """Whether the running engines of this worker and of the peer are warm as a pair."""
        raise NotImplementedError

    def why_not_warm(self) -> str:
        """Why the running engine is not warm yet; empty once one of its pairs is warm or, without peers, itself."""
        if any(self.is_warm_with(peer) for peer in self.peers.values()):
            return ""
        return f"not warm yet with {', '.join(self.not_warm_with()) or f'any {self.peer_role} worker'}"

    def not_warm_with(self) -> list[str]:
        """Names of the peers whose engine is up but with which this one is not warm."""
        return sorted(name for name, peer in self.peers.items() if peer.incarnation and not self.is_warm_with(peer))

    def peer_left(self, name: str) -> None:
        """Called when a peer is no longer one of `peers`."""

    def engine_gone(self) -> None:
        """Called when the engine has ended, and again before the next one starts. Adapters and KV are lost."""

    def engine_up(self) -> None:
        """Called when a new engine is up. It holds the adapters that were loaded since its start."""

    def engine_suspected(self) -> None:
        """Called when the running engine is suspected to hang. It must answer a small request before it gets others."""

    async def run_role(self) -> None:
        """The role's own background work; runs until cancelled."""

    @contextlib.asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """Hold the role's resources for as long as the agent runs."""
        yield

    async def run_resources(self) -> None:
        """The background work of `resources`; runs until cancelled."""
        await asyncio.Event().wait()

    # Start, main loop, shutdown.

    async def run(self) -> str:
        """Serve until SIGTERM or SIGINT, then drain and stop the engine; or until the worker is to have another role.

        Returns that role, and leaves the engine to the agent that takes over.
        """
        self.engine = self.spec.client()
        settings = self.config.engine_of(self.name)
        supervisor = EngineSupervisor(
            self.spec,
            settings.start_timeout_s,
            self._engine_changed,
            hang_timeouts=_hang_timeouts(settings),
            num_answers=lambda: self.engine.num_answers,
            is_warm=lambda incarnation: self._warm_incarnation == incarnation,
            check_files=self._check_weights,
            role=self.role,
        )
        self.tracing = start_tracing(trace_settings(self.config.tracing), "prelude-worker", self.name)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self.tracing.stop)
            stack.push_async_callback(self.engine.aclose)
            await stack.enter_async_context(self.resources())
            await stack.enter_async_context(serve_control(self))
            await stack.enter_async_context(serve_worker_http(self))
            if self._change is not None:
                self._change.ended("agent_started_s")
            if self._supervising is None:
                self._peer_hosts_changed(frozenset())  # those of an earlier process may be gone
                self._supervisor, self._stop = supervisor, stop_signal()
                self._supervising = asyncio.create_task(supervisor.run(), name="engine")
            else:
                self._supervisor.hand_over(supervisor)
            tasks = [
                asyncio.create_task(coroutine, name=name)
                for name, coroutine in (
                    ("load", self._poll_load(lambda: self._supervisor.progress)),
                    ("readiness", self._follow_readiness()),
                    ("role", self.run_role()),
                    ("resources", self.run_resources()),
                    ("peers", self.peers.run()),
                    ("role change", self._next_role.get()),
                )
            ]
            running: list[asyncio.Future[Any]] = [self._stop, self._supervising, *tasks]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if done == {tasks[-1]}:
                self._change = Stopwatch()
                await _end(tasks)
                return str(tasks[-1].result())
            if self._stop in done:
                log.info("stopping")
                self._is_stopping = True
                if not await self.drain():
                    log.warning("stopping with requests in flight: drain timeout exceeded")
            # Bounds the shutdown. The end of this process ends the engine, too.
            asyncio.get_running_loop().call_later(_STOP_LIMIT_S, os._exit, 1)
            given_up, *_ = await _end([self._supervising, *tasks])
            if self._stop not in done:
                if isinstance(given_up, EngineGivenUp):
                    raise StartError(str(given_up)) from given_up
                raise SystemExit(1)
            self._stop.cancel()
        return ""

    def take_over(self, before: WorkerAgent) -> None:
        """Run the engine of the worker's agent before this one, which has ended."""
        self.spec, self._supervisor, self._change = before.spec, before._supervisor, before._change
        self._supervising, self._stop = before._supervising, before._stop
        if before._warm_incarnation:
            self._switched_incarnation = self._supervisor.snapshot.incarnation  # not that of an engine started again

    @property
    def was_used(self) -> bool:
        """Whether the running engine has answered each kind of request, perhaps in another role."""
        return bool(self.incarnation) and self.incarnation in (self._ready_incarnation, self._switched_incarnation)

    async def change_role(
        self, role: str, deadline_s: float | None, give_back_after_s: float = 0.0, *, even_last: bool = False
    ) -> None:
        """Drain, then end for an agent of another role. Raises RoleChangeRefused, or TimeoutError if requests go on.

        `give_back_after_s`: routers then place elsewhere what waits, perhaps for memory of a full peer. 0: never.
        `even_last`: also if no other worker of its role takes requests.
        """
        if role == self.role:
            return
        if role not in PEER_ROLES:
            raise RoleChangeRefused(
                f"{self.name} cannot become {role}: roles change between {' and '.join(PEER_ROLES)}"
            )
        if self.successor is None:
            raise RoleChangeRefused(
                f"{self.name} is a {self.role} worker and cannot become {role}; see `role_changes` of cluster.yaml"
            )
        if self.hub.state.leaves_role:
            raise RoleChangeRefused(f"{self.name} is changing its role; ask again when it has")
        # Said before the others are asked: of the last two, both told to leave at once, at least one sees the other.
        self.hub.update(leaves_role=True)
        try:
            if not even_last and not await self.peers.any_stays(self.role):
                raise RoleChangeRefused(
                    f"{self.name} is the last {self.role} worker that takes requests, and no pair answers without one; "
                    f"make another one {self.role} first, or ask again with --even-last"
                )
            await self._leave(role, deadline_s, give_back_after_s)
        except BaseException:  # also if the caller has gone
            self.hub.update(leaves_role=False)
            raise

    async def _leave(self, role: str, deadline_s: float | None, give_back_after_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(give_back_after_s or MAX_DURATION_S, lambda: self.hub.update(gives_back=True))
        was_drained = self.hub.state.draining
        own = self._num_drains + 1  # who drains it meanwhile, such as an operator, wants nothing but that
        try:
            if not await self.drain(deadline_s) or self._num_drains != own:
                raise TimeoutError(
                    f"{self.name} has requests in flight, or was undrained or drained: it keeps its role"
                )
            if self._is_stopping:
                raise RoleChangeRefused(f"worker {self.name} is stopping")
        except BaseException:  # also if the caller has gone: nobody else would undrain it
            self.hub.update(gives_back=False)
            if not (self._is_stopping or was_drained) and self._num_drains == own:
                self.undrain()
            raise
        finally:
            timer.cancel()
        self._next_role.put_nowait(role)

    async def drain(self, deadline_s: float | None = None) -> bool:
        """Stop taking requests; true if those in flight finished within the deadline, by default `drain_timeout_s`.

        The worker stays drained, whichever engine it runs, until `undrain`, which also ends the wait.
        """
        log.info("draining")
        self._num_drains += 1
        self.hub.update(draining=True)
        self._changed.set()
        deadline = time.monotonic() + (self.config.drain_timeout_of(self.name) if deadline_s is None else deadline_s)
        # The engine publishes its load between batches, and routers may send requests for a moment longer.
        idle_since: float | None = None
        while time.monotonic() < deadline and self.hub.state.draining:
            if self.hub.state.engine_state != pb.ENGINE_STATE_UP:
                return True
            try:
                load = await self.engine.load()
            except EngineError:  # it is slow to answer, or its end has not been seen yet
                idle_since = None
                await asyncio.sleep(_LOAD_POLL_BUSY_S)
                continue
            now = time.monotonic()
            if load.running_requests + load.queued_requests + load.used_kv_tokens > 0:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            elif now - idle_since >= _IDLE_FOR_S:
                return True
            await asyncio.sleep(_LOAD_POLL_BUSY_S)
        return False

    def undrain(self) -> bool:
        """Take requests again; true if it was draining. Raises WorkerStopping."""
        if self._is_stopping:
            raise WorkerStopping(f"worker {self.name} is stopping; the one that is started next takes requests")
        was_draining = self.hub.state.draining
        if was_draining:
            log.info("taking requests again")
        self.hub.update(draining=False)
        self._changed.set()
        return was_draining

    def describe(self) -> pb.WorkerDescription:
        """The worker's properties, constant for the agent's lifetime."""
        adapters = self.spec.adapters if self.adapters is not None else None
        bootstrap_port = self.spec.bootstrap_port if self.role == "prefill" else None
        return pb.WorkerDescription(
            name=self.name,
            role=_ROLES[self.role],
            engine_url=self.spec.url,
            kv_host=self.spec.host if bootstrap_port else "",
            kv_bootstrap_port=bootstrap_port or 0,
            model=self.spec.served_name,
            engine_version=SGLANG_VERSION,
            hooks=[hook.name for hook in hooks_for(self.spec.role, self.spec.device)],
            max_adapter_rank=adapters.max_rank if adapters else 0,
            target_modules=adapters.target_modules if adapters else (),
            domain=self.worker.domain,
            agent_id=self._agent_id,
            tensor_parallel=self.spec.tensor_parallel,
            engine_key=self.spec.keys.requests if self.spec.keys else "",
            kv_page_tokens=self.spec.kv_page_tokens,
            base_weights=self._base_weights,
            dtype=self.spec.dtype,
            metrics_port=self.worker.metrics_port,
        )

    def _check_weights(self) -> None:
        """Raise EngineError if an engine loads other weights than this worker is known for."""
        try:
            found = base_weights_of(self.spec)
        except ConfigError as error:
            raise EngineError(str(error)) from error
        if found != self._base_weights:
            raise EngineError(
                f"the files of {self.spec.model_path} have changed since this worker started: restart the worker, "
                "and all others that are to exchange KV with it"
            )

    @property
    def registry(self) -> CollectorRegistry:
        """This worker's metrics."""
        return self.metrics.registry

    async def engine_metrics(self) -> bytes:
        """The engine's own metrics. Raises EngineError."""
        return await self._engine_metrics.page()

    async def _ask_for_metrics(self) -> bytes:
        if self.hub.state.engine_state != pb.ENGINE_STATE_UP:
            raise EngineUnreachable(self.hub.state.reason or "it is not up")
        return await self.engine.metrics()

    @property
    def incarnation(self) -> str:
        """The running engine's incarnation; empty if none runs."""
        return self.hub.state.incarnation

    def reconsider(self) -> None:
        """Re-evaluate readiness."""
        self._changed.set()

    def _peer_hosts_changed(self, hosts: frozenset[str]) -> None:
        if self.spec.kv_found_peers is not None:
            write_found_peers(self.spec.kv_found_peers, hosts)

    def _engine_changed(self, snapshot: EngineSnapshot) -> None:
        is_new = snapshot.incarnation != self.incarnation
        # When an engine is found to be down, some of its processes may still answer; when the next is about to start,
        # none does. What is loaded from then on is in the new engine, also before that is known to be up.
        if (is_new and self.incarnation) or snapshot.status is EngineStatus.STARTING:
            self.hub.clear_resident()
            self.engine_gone()
        if is_new:
            if snapshot.incarnation:
                self.engine_up()
            self.hub.update(load=pb.Load())
        self.metrics.engine_restarts.set(snapshot.num_restarts)
        if snapshot.suspicion and not self._suspicion:
            self._ready_incarnation = ""
            self.engine_suspected()
        self._suspicion = snapshot.suspicion
        self.metrics.hung.set(bool(snapshot.suspicion))
        hung = {"ready": False, "hung": True} if snapshot.suspicion else {"hung": False}
        self.hub.update(
            engine_state=_ENGINE_STATES[snapshot.status],
            incarnation=snapshot.incarnation,
            reason=snapshot.suspicion or snapshot.reason,
            **hung,
        )
        self._changed.set()

    async def _follow_readiness(self) -> None:
        """Become ready once the engine is up and warm, and stay ready for that engine's lifetime.

        A peer that starts later does not affect this worker: the peer becomes ready once one of its pairs is warm.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            up = self.hub.state.engine_state == pb.ENGINE_STATE_UP and not self._suspicion
            reason = self.hub.state.reason
            if up and self._ready_incarnation != self.incarnation:
                reason = self.why_not_warm()
                if not reason:
                    self._ready_incarnation = self._warm_incarnation = self.incarnation
            ready = up and self._ready_incarnation == self.incarnation
            if ready:
                reason = "draining" if self.hub.state.draining else ""
                if self._change is not None:
                    self._change.ended("warmed_up_s")
                    log.info("role changed", extra={"fields": {"role": self.role, **self._change.parts}})
                    self._change = None
            if ready != self.hub.state.ready:
                log.info("ready" if ready else "not ready", extra={"fields": {"reason": reason}})
            self.hub.update(ready=ready, reason=reason, not_warm_with=self.not_warm_with() if up else [])
            self.metrics.ready.set(ready and not self.hub.state.draining)
            self.metrics.draining.set(self.hub.state.draining)

    async def _poll_load(self, progress: Callable[[], int]) -> None:
        """Publish the engine's load. These calls also check that its HTTP server answers."""
        while True:
            busy = False
            if self.hub.state.engine_state == pb.ENGINE_STATE_UP:
                with contextlib.suppress(EngineError):
                    load = await self.engine.load()
                    busy = load.running_requests + load.queued_requests > 0
                    self.hub.update(progress=progress(), load=pb.Load(**dataclasses.asdict(load)))
                    self.metrics.observe_load(load)
            await asyncio.sleep(_LOAD_POLL_BUSY_S if busy else _LOAD_POLL_IDLE_S)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    """Cancel the tasks, and log those that have failed; their results or exceptions."""
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, Exception) and not isinstance(result, EngineGivenUp):
            log.error("task failed", extra={"fields": {"task": task.get_name()}}, exc_info=result)
    return results


def run_agent(agent: WorkerAgent) -> None:
    """Run the worker's agents in this process, one after another as its role changes, until it is stopped."""
    raise_open_files(_OPEN_FILES)
    grpc.aio.init_grpc_aio()
    uvloop.run(_run(agent))


async def _run(agent: WorkerAgent) -> None:
    while role := await agent.run():
        log.info("role changes", extra={"fields": {"from": agent.role, "to": role}})
        watch = agent._change
        assert agent.successor is not None
        assert watch is not None
        before, agent = agent, agent.successor(role)
        watch.ended("agent_replaced_s")
        await before._supervisor.change_role(role, watch)
        agent.take_over(before)
