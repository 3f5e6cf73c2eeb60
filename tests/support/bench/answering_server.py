"""A small HTTP server that answers prompts with token ids, as a router does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from training.data.prompts import Prompt

BASE = "base"
REVISION = "sha256:" + "a" * 64


@dataclass
class Answer:
    """What the server sends."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(status: int, code: str, message: str = "no", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer({"error": {"code": code, "message": message}}, status, named)


@dataclass
class AnsweringServer:
    """Answers each prompt with the expected ids, unless `answered` says otherwise."""

    prompts: Sequence[Prompt]
    answered: Callable[[dict[str, Any], Answer], Answer] = lambda body, right: right
    models: Answer = field(default_factory=lambda: Answer({"data": [{"id": "acme", "parent": BASE}, {"id": BASE}]}))
    hold_s: float = 0.0  # before each answer
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies
    keys: set[str | None] = field(default_factory=set)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        with self._lock:
            self.asked.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.hold_s)
            prompt = next(
                each
                for each in self.prompts
                if each.path == path and all(body.get(name) == value for name, value in each.fields.items())
            )
            choice = {
                "token_ids": list(prompt.turn.answers[0])[: body["max_tokens"]],
                "prompt_token_ids": list(prompt.turn.context),
            }
            headers = {"x-prelude-revision": REVISION} if "adapter" in body else {}
            return self.answered(body, Answer({"choices": [choice]}, headers=headers))
        finally:
            with self._lock:
                self._now -= 1


@contextmanager
def answering(server: AnsweringServer) -> Iterator[AnsweringServer]:
    """Serve inside the block, at an ephemeral port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(server.models if self.path == "/v1/models" else refusal(404, "unknown_path"))

        def do_POST(self) -> None:
            server.keys.add(self.headers["authorization"])
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(server.answer(self.path, body))

        def _send(self, answer: Answer) -> None:
            content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
