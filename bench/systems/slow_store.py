"""Simulates remote object storage: serves a folder read-only over S3's protocol, with a delay.

    python -m bench.systems.slow_store FOLDER DELAY_S

serves FOLDER as the bucket `BUCKET` on loopback and prints its port. Implements the part of the protocol that reading
needs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from bench.errors import SystemFailed

BUCKET = "adapters"


def make_app(folder: Path, delay_s: float) -> web.Application:
    """An app that delays every answer by `delay_s`."""

    @web.middleware
    async def late(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await handler(request)

    async def bucket(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[late])
    app.router.add_get(f"/{BUCKET}", bucket)  # also answers HEAD: the bucket exists
    app.router.add_static(f"/{BUCKET}", folder)
    return app


@contextmanager
def slow_store(folder: Path, delay_s: float) -> Iterator[str]:
    """Run the store in a separate process during the context; yields its URL. Raises SystemFailed.

    Sets placeholder AWS keys in the environment if it has none: clients need keys, the store checks none.
    """
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "none")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "none")
    command = [sys.executable, "-m", "bench.systems.slow_store", str(folder), str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise SystemFailed(f"the slow store did not start; it ended with {process.wait()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def _serve(folder: Path, delay_s: float) -> None:
    runner = web.AppRunner(make_app(folder, delay_s), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
