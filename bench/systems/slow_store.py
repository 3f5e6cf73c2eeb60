"""A store that answers late, as object storage elsewhere does: a folder's files over S3's protocol, read only.

    python -m bench.slow_store FOLDER DELAY_S

serves FOLDER as the bucket `BUCKET` on loopback and prints its port. It speaks as much of the protocol as reading
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
    """Every answer comes after `delay_s`; then it is as fast as the machine."""

    @web.middleware
    async def late(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await handler(request)

    async def bucket(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[late])
    app.router.add_get(f"/{BUCKET}", bucket)  # and HEAD: it is there
    app.router.add_static(f"/{BUCKET}", folder)
    return app


@contextmanager
def slow_store(folder: Path, delay_s: float) -> Iterator[str]:
    """The endpoint's URL, for as long as the context lasts. In a process of its own. Raises SystemFailed.

    Clients that are started meanwhile find keys in their environment: they need some, the store asks for none.
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
