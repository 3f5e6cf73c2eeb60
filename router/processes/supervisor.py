"""Starts the processes of one router, restarts those that end, and stops them together."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from adapters.files.locked_folder import LockedFolder, sweep_abandoned
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from process.lifetime import end_processes, how_ended, stop_signal
from router.processes.siblings import bound_listener

_FOLDER_PREFIX = "prelude-router-"
_RESTART_S = 1.0
_STOP_MARGIN_S = 5.0  # beyond the drain timeout
_WRONG_CONFIG = 2  # exit code: a restart would not help

log = logging.getLogger(__name__)


def run_processes(config: ClusterConfig, path: Path) -> int:
    """Run `router.processes` processes on one port until SIGTERM or SIGINT. Returns the exit code. Raises ConfigError.

    `path`: the configuration's file.
    """
    router = config.router
    ports = (("router.port", router.host, router.port), ("router.admin.port", router.admin.host, router.admin_port))
    for field, _, number in ports:
        if not number:
            raise ConfigError(f"{field}: several processes need a port that they can share; name one")
    # Held without listening, so that no other program gets them.
    held = [bound_listener(field, host, number, share=True) for field, host, number in ports]
    temporary = Path(tempfile.gettempdir())
    sweep_abandoned(_FOLDER_PREFIX, temporary)  # left by killed ones
    folder = LockedFolder(_FOLDER_PREFIX, "", temporary)
    try:
        return asyncio.run(_Processes(config, path, folder.path).run())
    finally:
        folder.close()
        for listener in held:
            listener.close()


class _Processes:
    def __init__(self, config: ClusterConfig, path: Path, folder: Path) -> None:
        self._config = config
        self._path = path
        self._folder = folder
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        stop = stop_signal()
        keepers = [
            asyncio.create_task(self._keep(number), name=f"keep router process {number}")
            for number in range(self._config.router.processes)
        ]
        try:
            either: list[asyncio.Future[Any]] = [stop, *keepers]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return next((keeper.result() for keeper in keepers if keeper.done()), 0)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop()

    async def _keep(self, number: int) -> int:
        """Run one process, restarting it when it ends. Returns the exit code if it cannot run."""
        while True:
            try:
                process = self._running[number] = await self._launch(number)
                code = await process.wait()
                if code == _WRONG_CONFIG:
                    return code
                log.error(
                    "router process ended; restarting it", extra={"fields": {"number": number, "how": how_ended(code)}}
                )
            except OSError as error:  # out of memory, processes or files: the loop retries
                log.error("router process not started", extra={"fields": {"number": number, "reason": str(error)}})
            await asyncio.sleep(_RESTART_S)

    async def _launch(self, number: int) -> asyncio.subprocess.Process:
        words = ["router", "--config", str(self._path), "--process", str(number), "--sockets", str(self._folder)]
        environment = {**os.environ, "PRELUDE_DIE_WITH_PARENT": "1"}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal reaches only this one: a second signal ends them at once
        )

    async def _stop(self) -> None:
        """Let every process finish its requests within the drain timeout."""
        grace_s = self._config.router.drain_timeout_s + _STOP_MARGIN_S
        await end_processes(self._running.values(), grace_s, asyncio.subprocess.Process.kill)
