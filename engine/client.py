"""HTTP client for an engine's control endpoints, used by its agent."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from engine.access import Tls
from engine.errors import AdapterNotTaken, EngineRefused, EngineUnreachable
from process.exhaustion import is_exhaustion

_KEEPALIVE_S = 2.0  # SGLang closes idle connections after 5 s; a call on a closing one would look like an engine crash

_METRICS_TIMEOUT_S = 5.0  # below Prometheus' own, 10 s
MAX_METRICS_BYTES = 16 * 1024**2
_MAX_ANSWER_BYTES = 64 * 1024**2  # of any other answer; the longest is the list of 100,000 adapters

# Those that the agent uses.
_ADMIN_PATHS = frozenset({"/load_lora_adapter", "/unload_lora_adapter", "/freeze_gc", "/pd_role_switch"})

IN_USE = "is in use"  # in the engine's error when it refuses an unload (`engine/hooks/uses.py`)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The scheduler's load, published when the batch of a prompt begins, after each batch, and while requests wait."""

    running_requests: int = 0  # also prompts that are being computed
    queued_requests: int = 0  # waiting, bootstrapping, transferring KV or retracted
    used_kv_tokens: int = 0
    max_kv_tokens: int = 0
    # Queued: prompts that decode has no room for; on a decode engine, what has none here.
    awaiting_room_requests: int = 0
    awaiting_kv_requests: int = 0  # queued: read, KV being sent; on a decode engine, with room for KV that is not here
    max_running_requests: int = 0
    active_kv_tokens: int = 0  # in use, without what is kept for KV that is not here
    read_tokens: int = 0  # of prompts, since its start, without those that were in the prefix cache
    reading_us: int = 0  # for them, from the begin of a batch to its result: batches may overlap
    decode_steps: int = 0  # since its start, those that followed another one at once
    decode_us: int = 0  # for them


class EngineClient:
    """Calls one engine's HTTP server. Every call has a deadline; close with `aclose`."""

    def __init__(
        self, url: str, timeout_s: float = 10.0, *, key: str = "", admin_key: str = "", tls: Tls | None = None
    ) -> None:
        """`tls`: for an engine that serves HTTPS."""
        self._url = url
        self._key = key
        self._admin_key = admin_key
        self._tls = tls
        self._timeout_s = timeout_s
        connector = aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector)
        # Of the server, errors too: signs that it lives. So are calls that this process had no descriptor for, or an
        # engine would be ended as one that hangs for what its agent lacks.
        self.num_answers = 0

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def answers(self) -> bool:
        """True once the server accepts requests; of a node without one, once SGLang says that its ranks are up."""
        try:
            await self._call("GET", "/model_info")
        except (EngineUnreachable, EngineRefused):
            return False
        return True

    async def spare_garbage_collection(self) -> None:
        """Exempt all objects that the engine's processes have now from garbage collection.

        Most are modules. A collection of all of them stopped the server, with its streams, for 0.4 s. The call reaches
        the scheduler and the detokenizer, too.
        """
        await self._call("POST", "/freeze_gc")

    async def load(self) -> EngineLoad:
        """Current queue lengths and KV use, summed over data-parallel ranks."""
        answer = await self._call("GET", "/v1/loads?include=core,disagg,queues")
        loads = [_load_of(rank) for rank in answer["loads"]]
        return EngineLoad(*(sum(each) for each in zip(*map(astuple, loads), strict=True))) if loads else EngineLoad()

    async def load_adapter(self, revision_id: str, directory: Path, timeout_s: float) -> None:
        """Load a serving directory under the revision's id. Raises AdapterNotTaken with the engine's reason."""
        body = {"lora_name": revision_id, "lora_path": str(directory)}
        answer = await self._call("POST", "/load_lora_adapter", body, timeout_s)
        # An earlier call that timed out here may have succeeded in the engine.
        if not answer["success"] and revision_id not in await self.loaded_adapters():
            raise AdapterNotTaken(answer["error_message"])

    async def unload_adapter(self, revision_id: str, timeout_s: float) -> bool:
        """Unload a revision; does nothing if the engine does not hold it. True if the engine confirms that it has.

        If not confirmed, a load of the revision may still be in progress in the engine. Raises EngineRefused with the
        engine's reason, which contains IN_USE if requests use the adapter.
        """
        answer = await self._call("POST", "/unload_lora_adapter", {"lora_name": revision_id}, timeout_s)
        if answer["success"]:
            return True
        reason = answer["error_message"]
        # `loaded_adapters` lists every adapter, so it comes second.
        if IN_USE in reason or revision_id in await self.loaded_adapters():
            raise EngineRefused(reason)
        return False

    async def loaded_adapters(self) -> frozenset[str]:
        """Revision ids that the engine holds."""
        models = await self._call("GET", "/v1/models")
        return frozenset(model["id"] for model in models["data"] if model.get("parent"))

    async def change_role(self, role: str, timeout_s: float) -> bool:
        """Give a switching engine without adapters another role; false while it has requests. Raises EngineRefused."""
        body = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}  # SGLang checks no room for the graphs
        answer = await self._call("POST", "/pd_role_switch", body, timeout_s)
        if not answer["success"] and "instance is not idle" not in answer["message"]:
            raise EngineRefused(answer["message"])
        return bool(answer["success"])

    async def complete(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Request one completion, not streamed."""
        return await self._call("POST", "/v1/completions", body, timeout_s)

    async def abort(self, request_id: str) -> None:
        """Abort every request whose id starts with `request_id`."""
        await self._call("POST", "/abort_request", {"rid": request_id})

    async def metrics(self) -> bytes:
        """The engine's own metrics, in the text format in which `sglang:` keeps its colon.

        Raises EngineUnreachable, and EngineRefused for more than MAX_METRICS_BYTES.
        """
        async with self._answer("GET", "/metrics", None, _METRICS_TIMEOUT_S, "text/plain;version=0.0.4") as answer:
            if answer.status != 200:
                raise EngineRefused(f"/metrics answered {answer.status}")
            return await _content(answer, MAX_METRICS_BYTES)

    async def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        async with self._answer(method, path, body, timeout_s) as answer:
            content = await _content(answer, _MAX_ANSWER_BYTES)
            if answer.status >= 400 and not content.startswith(b'{"rid"'):
                raise EngineRefused(f"{path} answered {answer.status}: {content[:500].decode(errors='replace')}")
            if answer.content_type != "application/json":
                return None
            try:
                return json.loads(content)
            except (ValueError, RecursionError) as error:
                raise EngineRefused(f"{path} answered what is no JSON") from error

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Any, timeout_s: float | None, accept: str = "*/*"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The deadline includes reading the answer. Raises EngineUnreachable."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        try:
            key = self._admin_key if path in _ADMIN_PATHS else self._key
            headers = {"accept": accept, **({"authorization": f"Bearer {key}"} if key else {})}
            tls = self._tls() if self._tls is not None and self._url.startswith("https:") else None
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                timeout=timeout,
                headers=headers,
                ssl=True if tls is None else tls[0],
                server_hostname=None if tls is None else tls[1],
            ) as answer:
                self.num_answers += 1
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            self.num_answers += is_exhaustion(error)
            raise EngineUnreachable(f"{self._url}{path}: {error or type(error).__name__}") from error


async def _content(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of an answer, which may be a peer's. Raises EngineRefused for more bytes."""
    content = bytearray()
    async for part in answer.content.iter_any():
        content += part
        if len(content) > most_bytes:
            raise EngineRefused(f"{answer.url.path} answered more than {most_bytes} bytes")
    return bytes(content)


def _load_of(rank: dict[str, Any]) -> EngineLoad:
    """The load of one data-parallel rank. Disaggregated engines report more fields, and none before the first batch."""
    pair, queues = rank.get("disaggregation") or {}, rank.get("queues") or {}
    awaiting_room, awaiting_kv = pair.get("prefill_bootstrap_queue_reqs", 0), pair.get("prefill_inflight_queue_reqs", 0)
    if pair.get("mode") == "decode":
        # Of the queue for room, those that have met their prefill engine: they wait for nothing else.
        awaiting_room = queues.get("prealloc_ready", 0) + pair.get("decode_retracted_queue_reqs", 0)
        awaiting_kv = pair.get("decode_transfer_queue_reqs", 0)
    used_kv_tokens = rank["num_used_tokens"]
    decode_steps, _, decode_us, *_ = rank.get("decode_moments") or (0, 0, 0)
    return EngineLoad(
        rank["num_running_reqs"],
        rank["num_waiting_reqs"],
        used_kv_tokens,
        rank["max_total_num_tokens"],
        awaiting_room,
        awaiting_kv,
        rank.get("max_running_requests", 0),
        min(used_kv_tokens, rank.get("num_active_tokens", used_kv_tokens)),
        rank.get("total_prefill_uncached_tokens", 0),
        rank.get("total_prefill_busy_us", 0),
        int(decode_steps),
        int(decode_us),
    )
