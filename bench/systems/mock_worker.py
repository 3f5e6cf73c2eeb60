"""A worker without a model, as a process: an HTTP server that answers as SGLang does, and an agent's control service.

    python -m bench.systems.mock_worker '{"name": "decode-0", "role": "decode", "engine_port": 7002, …}'

Its answers cost almost nothing, so that a router in front of it is what a benchmark measures.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httptools
import msgspec
import uvloop

from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.control.transport import Transport
from process.certificates.contexts import make_server_context
from process.certificates.files import CertificateFiles
from process.lifetime import die_with_parent

HOST = "127.0.0.1"
_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
_GENERATING = (b"/v1/chat/completions", b"/v1/completions", b"/generate")


class WorkerSettings(msgspec.Struct, frozen=True):
    """What one mock worker is. Passed on its command line, as JSON."""

    name: str
    role: str  # "prefill" or "decode"
    model: str
    engine_port: int
    control_port: int
    bootstrap_port: int
    warm_with: tuple[str, ...]  # decode workers, for a prefill worker
    num_events: int  # of a stream, without the last one, [DONE]
    event_gap_s: float
    tls: tuple[str, str, str] | None = None  # certificate, key and authorities: mutual TLS, and a key for its engine

    @property
    def files(self) -> CertificateFiles | None:
        return None if self.tls is None else CertificateFiles(*map(Path, self.tls))


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Stream(msgspec.Struct):
    stream: bool = False
    stream_options: _StreamOptions | None = None


_stream = msgspec.json.Decoder(_Stream)

# ---- what SGLang sends ----------------------------------------------------------------------------------------------


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Answers:
    """The bytes of every answer of one worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        common = {"id": "0" * 32, "created": 1_750_000_000, "model": settings.model}
        choice = {"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}
        delta = {"role": None, "content": " hello", "reasoning_content": None, "tool_calls": None}
        message = {"role": "assistant", "content": " hello", "reasoning_content": None, "tool_calls": None}
        usage = {"prompt_tokens": 50, "total_tokens": 51, "completion_tokens": 1, "prompt_tokens_details": None}
        event = {"object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}], "usage": None}
        answer = {"object": "chat.completion", "choices": [{**choice, "message": message, "finish_reason": "stop"}]}
        info = {
            "model_path": settings.model,
            "served_model_name": settings.model,
            "disaggregation_bootstrap_port": settings.bootstrap_port,
            "tp_size": 1,
            "dp_size": 1,
        }
        models = {"object": "list", "data": [{"id": settings.model, "object": "model"}]}
        counts = {**usage, "completion_tokens": settings.num_events, "total_tokens": 50 + settings.num_events}
        total = {"object": "chat.completion.chunk", "choices": [], "usage": counts}
        self.usage = _chunk(b"data: " + msgspec.json.encode({**common, **total}) + b"\n\n")
        self.event = _chunk(b"data: " + msgspec.json.encode({**common, **event}) + b"\n\n")
        self.answer = _whole(msgspec.json.encode({**common, **answer, "usage": usage}))
        self.info = _whole(msgspec.json.encode(info))
        self.models = _whole(msgspec.json.encode(models))


class _Engine(asyncio.Protocol):
    """One connection to the engine's HTTP server. Pipelined requests are not supported: no router sends them."""

    def __init__(self, settings: WorkerSettings, answers: _Answers) -> None:
        self._settings = settings
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._includes_usage: bool | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a probe for HTTP/2
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.startswith(_GENERATING):
            asked = _stream.decode(self._body)
            if asked.stream:
                self._includes_usage = asked.stream_options is not None and asked.stream_options.include_usage
                self._transport.write(_STREAM_HEAD)
                self._send_event(self._settings.num_events)
            else:
                self._transport.write(self._answers.answer)
        elif self._url.startswith(b"/v1/models"):
            self._transport.write(self._answers.models)
        else:
            self._transport.write(self._answers.info)

    def _send_event(self, num_left: int) -> None:
        if num_left:
            self._transport.write(self._answers.event)
            self._timer = self._loop.call_later(self._settings.event_gap_s, self._send_event, num_left - 1)
        else:
            if self._includes_usage:
                self._transport.write(self._answers.usage)
            self._transport.write(_STREAM_END)


# ---- the agent ------------------------------------------------------------------------------------------------------


class _Agent(WorkerControlServicer):
    """Reports a ready worker whose pairs are all warm."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    async def Describe(self, request: Any, context: Any) -> pb.WorkerDescription:
        settings = self._settings
        return pb.WorkerDescription(
            name=settings.name,
            role=_ROLES[settings.role],
            engine_url=f"http{'' if settings.tls is None else 's'}://{HOST}:{settings.engine_port}",
            engine_key="" if settings.tls is None else "k" * 43,
            kv_host=HOST if settings.role == "prefill" else "",
            kv_bootstrap_port=settings.bootstrap_port,
            model=settings.model,
        )

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[pb.WorkerState]:
        settings = self._settings
        state = pb.WorkerState(
            incarnation=_incarnation(settings.name),
            engine_state=pb.ENGINE_STATE_UP,
            ready=True,
            load=pb.Load(max_kv_tokens=1 << 20),
            warm_pairs=[
                pb.WarmPair(decode_name=name, decode_incarnation=_incarnation(name)) for name in settings.warm_with
            ],
            residency=pb.ResidencyDelta(snapshot=True),
        )
        while True:
            yield state
            state.ClearField("residency")
            await asyncio.sleep(request.heartbeat_s / 2)

    async def EnsureAdapter(self, request: Any, context: Any) -> pb.EnsureAdapterResponse:
        return pb.EnsureAdapterResponse(load_s=0.0)


def _incarnation(name: str) -> str:
    return f"{name}-1"


async def _serve(settings: WorkerSettings) -> None:
    answers = _Answers(settings)
    new_connection: Callable[[], asyncio.Protocol] = lambda: _Engine(settings, answers)  # noqa: E731
    tls = None if settings.files is None else make_server_context(settings.files)
    engine = await asyncio.get_running_loop().create_server(new_connection, HOST, settings.engine_port, ssl=tls)
    agent = grpc.aio.server(options=[("grpc.so_reuseport", 0)])  # a taken port is an error
    add_WorkerControlServicer_to_server(_Agent(settings), agent)
    Transport(settings.files).add_port(agent, f"{HOST}:{settings.control_port}")
    await agent.start()
    await engine.serve_forever()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=WorkerSettings)))
