"""A stand-in for an engine beside its agent: an HTTP server that answers in the format of SGLang 0.5.23.

It shows which calls the agent makes, in which order, and that the folders are complete and can be mapped. It does not
show that SGLang loads packed files, nor for how long that blocks its scheduler.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from support.routers.served_routes import kill, serve

from adapters.errors import AdapterMissing
from adapters.packed import PackedRevision, read_packed


class Engine:
    """Maps the adapters that are loaded into it, as an engine does, once it `may_answer`.

    Completions are answered with `statuses` first. It says of itself that it runs `num_running` requests.
    """

    def __init__(self, *statuses: int, is_sick: bool = False) -> None:
        self.statuses = list(statuses)
        self.completions: list[dict[str, Any]] = []
        self.num_running, self.loads_status = 0, 200
        self.asked = asyncio.Event()  # how many it runs
        self.held: dict[str, PackedRevision] = {}
        self.in_use: set[str] = set()
        self.refused: dict[str, str] = {}  # revision -> reason
        self.refused_folders: list[str] = []
        self.connections: set[tuple[str, int]] = set()  # clients that requested the list of models
        self.calls: list[tuple[str, str]] = []
        self.aborted: list[str] = []
        self.load_s = 0.0
        self.num_loading = 0
        self.may_answer = asyncio.Event()
        if not is_sick:
            self.may_answer.set()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.is_up = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/load_lora_adapter", self._load),
            web.post("/unload_lora_adapter", self._unload),
            web.post("/v1/completions", self._complete),
            web.post("/abort_request", self._abort),
            web.get("/v1/models", self._models),
            web.get("/v1/loads", self._loads),
        ]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Self]:
        await self.start()
        try:
            yield self
        finally:
            self.may_answer.set()
            await self.stop()

    async def asked_again(self) -> None:
        self.asked.clear()
        async with asyncio.timeout(120):
            await self.asked.wait()

    async def start(self) -> None:
        """Again at the same port."""
        self._runner, self._port = await serve(self.routes(), self._port)
        self.url = f"http://127.0.0.1:{self._port}"
        self.is_up = True

    async def stop(self) -> None:
        """Simulate a kill: it holds nothing afterwards."""
        assert self._runner is not None
        self.is_up = False
        await kill(self._runner)
        self.held.clear()
        self.in_use.clear()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        revision_id = body["lora_name"]
        self.calls.append(("load", revision_id))
        self.num_loading += 1
        try:
            await self.may_answer.wait()
            await asyncio.sleep(self.load_s)
            if revision_id in self.refused:
                self.refused_folders.append(body["lora_path"])
                return _answer(False, f"{self.refused[revision_id]} ({body['lora_path']})")
            if revision_id in self.held:
                return _answer(False, f"LoRA with name {revision_id} already exists.")
            folder = Path(body["lora_path"])
            try:
                held = read_packed(folder / "packed.safetensors")
            except AdapterMissing as error:
                return _answer(False, str(error))
            assert (folder / "adapter_config.json").is_file()
            self.held[revision_id] = held
            return _answer(True)
        finally:
            self.num_loading -= 1

    async def _unload(self, request: web.Request) -> web.Response:
        revision_id = (await request.json())["lora_name"]
        self.calls.append(("unload", revision_id))
        await self.may_answer.wait()
        if revision_id in self.in_use:
            return _answer(False, f"{revision_id} is in use by 1 request")
        if self.held.pop(revision_id, None) is None:
            return _answer(False, f"LoRA with name {revision_id} does not exist.")
        return _answer(True)

    async def _complete(self, request: web.Request) -> web.Response:
        self.completions.append(await request.json())
        await self.may_answer.wait()
        return web.json_response({}, status=self.statuses.pop(0) if self.statuses else 200)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        self.asked.set()
        rank = {"num_running_reqs": self.num_running, "num_waiting_reqs": 0, "num_used_tokens": 0}
        return web.json_response({"loads": [{**rank, "max_total_num_tokens": 1024}]}, status=self.loads_status)

    async def _models(self, request: web.Request) -> web.Response:
        self.connections.add(request.get_extra_info("peername"))
        models: list[dict[str, Any]] = [{"id": "base", "parent": None}]
        return web.json_response({"data": models + [{"id": each, "parent": "base"} for each in self.held]})


def _answer(success: bool, message: str = "") -> web.Response:
    body = {"rid": None, "success": success, "error_message": message}
    return web.json_response(body, status=200 if success else 400)
