"""Takes the pictures of docs/console.md: a real browser, a real router, stand-in workers.

python tests/support/observability/console_pictures.py docs/images
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.observability.browser import Page, browsing
from support.router_stand_ins import ClusterStandIn
from support.routers.management_calls import ask, lora, managing, upload

_ADAPTERS = {"acme/contracts": (1, 2, 3), "acme/support": (4,), "poet": (5, 6)}
_WORDS = (
    " The morning was quiet and the harbour was full of boats. Somebody opened a window, somebody closed a book, "
    "somebody counted the lamps along the road from the old bridge to the new station."
)
_SIZE = 1280, 730


async def _load(cluster: ClusterStandIn) -> None:
    """Three streams at a time, until cancelled."""
    adapters = ("acme/contracts", "poet", "acme/support", "a0")

    async def one(number: int) -> None:
        while True:
            await cluster.stream(prompt="Hi", adapter=adapters[number % len(adapters)])

    async with asyncio.TaskGroup() as streams:
        for number in range(3):
            streams.create_task(one(number))


async def take(folder: Path, seconds: float = 45.0) -> None:
    """Write the pictures after so many seconds under load."""
    with tempfile.TemporaryDirectory() as temporary:
        async with managing(2, 4, folder=Path(temporary) / "cluster") as cluster, browsing(*_SIZE) as page:
            for worker in cluster.decode:
                worker.engine.words = tuple(f"{word} " for word in _WORDS.split())
                worker.engine.event_gap_s = 0.2
                worker.state.load.max_kv_tokens, worker.state.load.used_kv_tokens = 32768, 9000
            await cluster.warm()
            for name, seeds in _ADAPTERS.items():
                for seed in seeds:
                    await upload(cluster, lora(Path(temporary), seed), name=name)
            await ask(cluster, "PUT", "/v1/adapters/acme/contracts/aliases/prod", json={"revision": "r2"})
            await cluster.decode[3].change(ready=False, reason="its engine is starting")
            await page.go(f"{cluster.admin_url}/console")
            loading = asyncio.create_task(_load(cluster))
            await asyncio.sleep(seconds)
            await _picture(page, folder / "console-fleet.png")
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await page.dark()
            await page.js("document.getElementById('tab-try').click()")
            for name, value in (("prompt", "Tell me about the sea."), ("left-adapter", "poet")):
                await page.js(f"document.getElementById('{name}').value = {value!r}")
            await page.js("document.getElementById('send').click()")
            await page.until("document.querySelector('#left-answer').textContent.length > 60")
            await _picture(page, folder / "console-try.png")


async def _picture(page: Page, path: Path) -> None:
    await asyncio.to_thread(path.write_bytes, await page.picture())


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
