"""The local supervisor behind `prelude up`: starts and stops all processes of a cluster on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from adapters.files.locked_folder import LockedFolder, sweep_abandoned
from cluster.agent.engine_spec import base_model_of, check_socket_paths, fitted_spec
from cluster.config.load import dump_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.host_memory import check_host_bytes
from cluster.local import shared_memory
from cluster.local.doctor.finding import Level
from cluster.local.doctor.report import quick_findings
from cluster.local.gpus import with_host_gpus
from cluster.local.ports import check_free, with_ports
from cluster.local.process_watch import ProcessWatch
from cluster.local.running import recorded
from process.addresses import host_and_port
from process.certificates.identity import ROUTER, TRAINER
from process.lifetime import end_processes, how_ended, kill_group, stop_signal

_FOLDER_PREFIX = "prelude-run"  # short: it holds engines' sockets, whose paths have a length limit
_RESTART_S = 1.0
_STOP_GRACE_S = 15.0  # after the drain
_READY_TIMEOUT_S = 600.0  # for all processes, or longer if an engine may:
_WARM_TIMEOUT_S = 120.0  # after an engine's start, until its pairs are warm
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=5)  # of status pages


class LocalCluster:
    """One router, the workers of `cluster.yaml` and their engines. `config` has every port filled in."""

    def __init__(self, config: ClusterConfig, logs: Path, report: Callable[[str], None] = lambda _line: None) -> None:
        temporary = Path(tempfile.gettempdir())
        sweep_abandoned(_FOLDER_PREFIX, temporary)  # left by killed supervisors
        self._folder = LockedFolder(_FOLDER_PREFIX, "", temporary)
        self._run_dir = self._folder.path
        self.config = with_ports(config).with_default_places(self._run_dir)  # removed with the cluster
        self.logs = logs
        self._report = report
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_ready = False  # all have been ready once: what fails later may pass
        self._failed: dict[str, str] = {}  # by process that has ended by itself before all were ready: why
        self._segments_before = shared_memory.segments()

    @property
    def _names(self) -> tuple[str, ...]:
        """Of all processes."""
        return (*self.config.workers, ROUTER, *(() if self.config.trainer is None else (TRAINER,)))

    @property
    def url(self) -> str:
        """The router's base URL, on this host."""
        scheme = "http" if self.config.router.tls is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.router.host, self.config.router.host)
        return f"{scheme}://{host_and_port(host, self.config.router.port)}"

    @property
    def admin_url(self) -> str:
        """Base URL of the router's metrics and debug pages."""
        return f"http://{host_and_port(self.config.router.admin.host, self.config.router.admin_port)}"

    async def start(self) -> None:
        """Start every process and wait until the router can serve requests. Raises StartError and ConfigError."""
        base = base_model_of(self.config)
        self.config = await asyncio.to_thread(with_host_gpus, self.config)
        for name in self.config.workers:  # a worker that cannot start would be restarted forever
            fitted_spec(self.config, name, self._run_dir, base)
        check_host_bytes(self.config)
        check_free(self.config)
        await asyncio.to_thread(self._check_host)
        self._make_logs()
        for name in self.config.workers:
            check_socket_paths(name, self._run_dir / name)
        try:
            dump_cluster_config(self.config, self._run_dir / "cluster.yaml")
        except OSError as error:
            raise StartError(
                f"{self._run_dir} cannot be written: {error.strerror}; set TMPDIR to another folder"
            ) from error
        for name in self._names:
            await self._launch(name)
        self._keepers = [asyncio.create_task(self._keep(name), name=f"keep {name}") for name in tuple(self._processes)]
        await self._wait_until_ready()
        self._keepers.append(asyncio.create_task(self._end_what_hangs(), name="end what hangs"))

    async def stop(self) -> None:
        """Stop every process, router first, and remove their temporary files and shared memory."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        own_segments = shared_memory.mapped_below(os.getpid())
        if "router" in self._processes:
            drain_s = self.config.router.drain_timeout_s
            await end_processes([self._processes.pop("router")], drain_s + _STOP_GRACE_S, _kill)
        drain_s = max((self.config.drain_timeout_of(name) for name in self.config.workers), default=0.0)
        await end_processes(self._processes.values(), drain_s + _STOP_GRACE_S, _kill)
        self._folder.close()
        shared_memory.remove_abandoned(shared_memory.segments() - self._segments_before, own_segments)

    def _check_host(self) -> None:
        """Raise StartError for what the quick checks of `prelude doctor` call an error; name missing adapters."""
        findings = quick_findings(self.config)
        if wrong := [f"{each.text} -> {each.remedy}" for each in findings if each.level is Level.ERROR]:
            raise StartError("\n".join(wrong))
        for each in findings:
            if each.topic == "adapters":
                self._report(f"{each.text} -> {each.remedy}")

    def _make_logs(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                self._log_of(name).write_bytes(b"")
        except OSError as error:
            text = f"logs cannot be written to {self.logs}: {error.strerror}; name another folder with --logs"
            raise StartError(text) from error

    async def _launch(self, name: str) -> None:
        scratch = self._run_dir / name
        scratch.mkdir(exist_ok=True)
        worker = self.config.workers.get(name)
        arguments = [name] if worker is None else [f"{worker.role}-worker", "--name", name, "--scratch", str(scratch)]
        with self._log_of(name).open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cli.main",
                *arguments,
                "--config",
                str(self._run_dir / "cluster.yaml"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PRELUDE_DIE_WITH_PARENT": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal reaches only the supervisor
            )

    def _log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def _keep(self, name: str) -> None:
        """Restart a process whenever it exits."""
        while True:
            code = await self._processes[name].wait()
            if not self._is_ready and code > 0:  # it would end again; one that was killed may start
                self._failed[name] = _last_words(self._log_of(name))
                return
            self._report(f"{name} ended {how_ended(code)} (see {self._log_of(name)}); restarting it")
            await asyncio.sleep(_RESTART_S)
            left = await asyncio.to_thread(self._abandoned_segments)
            try:
                await self._launch(name)
            except OSError as error:  # out of memory, processes or files: the loop retries
                self._report(f"{name} could not be started: {error}")
            if left:
                await asyncio.sleep(_RESTART_S)  # one that was just made is mapped by now
                await asyncio.to_thread(shared_memory.remove_abandoned, left)

    def _abandoned_segments(self) -> set[Path]:
        """What a killed agent's engine has left behind: its agent, which would remove it, has gone as well."""
        return shared_memory.abandoned(shared_memory.segments() - self._segments_before)

    async def _end_what_hangs(self) -> None:
        urls = {name: f"{self._page_url(name)}/health" for name in ("router", *self.config.workers)}

        def pid_of(name: str) -> int | None:
            process = self._processes.get(name)
            return None if process is None or process.returncode is not None else process.pid

        async with aiohttp.ClientSession(timeout=_PAGE_TIMEOUT) as session:
            await ProcessWatch(session, urls, pid_of, self._report).run()

    async def _wait_until_ready(self) -> None:
        started_at = time.monotonic()
        timeout_s = ready_timeout_s(self.config)
        seen: dict[str, str] = {}
        async with aiohttp.ClientSession(timeout=_PAGE_TIMEOUT) as session:
            while time.monotonic() - started_at < timeout_s:
                for name in ("router", *self.config.workers):
                    status = await _status_of(session, f"{self._page_url(name)}/ready")
                    if status != seen.get(name):
                        seen[name] = status
                        self._report(f"  {time.monotonic() - started_at:5.1f} s  {name}: {status}")
                if all(status == "ready" for status in seen.values()):
                    self._is_ready = True
                    return
                for name, reason in self._failed.items():
                    raise StartError(f"{name} cannot start: {reason} (see {self._log_of(name)})")
                await asyncio.sleep(0.25)
        raise StartError(
            f"the cluster was not ready within {timeout_s:.0f} s; see the logs in {self.logs}. Where engines need "
            "longer, raise engine.start_timeout_s"
        )

    def _page_url(self, name: str) -> str:
        """Where a process serves its status pages, in plain text: no certificate and no client is in the way."""
        if name == "router":
            return self.admin_url
        worker = self.config.workers[name]
        return f"http://{host_and_port(worker.host, worker.metrics_port)}"


def ready_timeout_s(config: ClusterConfig) -> float:
    """Seconds that a cluster may take to become ready: at least as long as its slowest engine may take to start."""
    starts_s = (config.engine_of(name).start_timeout_s for name in config.workers)
    return max(_READY_TIMEOUT_S, max(starts_s, default=0.0) + _WARM_TIMEOUT_S)


def _last_words(log: Path) -> str:
    """The error with which a process of ours has ended, else its last line."""
    text = log.read_text(errors="replace").strip()
    *_, error = text.rpartition("\nprelude: ") if "\nprelude: " in text else text.rpartition("\n")
    return error.removeprefix("prelude: ") or "it said nothing"


def _kill(process: asyncio.subprocess.Process) -> None:
    kill_group(process.pid, signal.SIGKILL)  # each process leads its group


async def _status_of(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as answer:
            if answer.status == 200:
                return "ready"
            body = await answer.json()
            return str(body.get("reason") or body.get("error", {}).get("message") or "not ready")
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return "starting"


@contextlib.asynccontextmanager
async def local_cluster(
    config: ClusterConfig, logs: Path, report: Callable[[str], None] = lambda _line: None
) -> AsyncIterator[LocalCluster]:
    """Run a cluster during the context; it is ready on entry."""
    cluster = LocalCluster(config, logs, report)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


async def run_until_stopped(
    config: ClusterConfig, logs: Path, report: Callable[[str], None], record: Path | None = None
) -> None:
    """Start a cluster, report its URL, and stop it at SIGINT or SIGTERM, even while it starts.

    `record`: the file in which commands find the chosen ports while it runs.
    """
    stop = stop_signal()  # before there is anything to clean up
    cluster = LocalCluster(config, logs, report)
    start = asyncio.create_task(cluster.start(), name="start")
    either: set[asyncio.Future[Any]] = {stop, start}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            await start
            with recorded(cluster.config, record):
                report(_welcome(cluster))
                await stop
        report("Stopping.")
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        stop.cancel()
        await cluster.stop()


def _welcome(cluster: LocalCluster) -> str:
    model = cluster.config.model.name
    adapter = next(iter(cluster.config.adapters), None)
    extra_json = f', "adapter": "{adapter}"' if adapter else ""
    extra_python = f', extra_body={{"adapter": "{adapter}"}}' if adapter else ""
    console = f"{cluster.url}/" if cluster.config.router.console else f"{cluster.admin_url}/console"
    asks_for_keys = cluster.config.router.auth is not None
    key, authorization = ("KEY", " -H 'Authorization: Bearer KEY'") if asks_for_keys else ("none", "")
    return f"""
Prelude is ready: {cluster.url}

  curl {cluster.url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} \\
    -d '{{"model": "{model}"{extra_json}, "max_tokens": 64, "messages": [{{"role": "user", "content": "Hello"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{cluster.url}/v1", api_key="{key}")
  answer = client.chat.completions.create(model="{model}", max_tokens=64,
      messages=[{{"role": "user", "content": "Hello"}}]{extra_python})
  print(answer.choices[0].message.content)

Console: {console}
Metrics: {cluster.admin_url}/metrics   Logs: {cluster.logs}   Stop: Ctrl-C
"""
