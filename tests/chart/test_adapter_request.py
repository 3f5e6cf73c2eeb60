"""What `helm test` runs, against a server that answers as a router does."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "helm" / "files" / "adapter_request.py"
GOOD = {"x-prelude-adapter": "acme/legal", "x-prelude-revision": "sha256:" + "1" * 64}
USAGE = {"usage": {"completion_tokens": 8}}


@contextmanager
def answering(*answers: tuple[int, dict[str, str], dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and what it was asked. The last answer is given again and again."""
    asked: list[dict[str, Any]] = []
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            status, headers, answer = left.pop(0) if len(left) > 1 else left[0]
            text = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def ask(url: str, timeout_s: float = 1.0, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"URL": url, "MODEL": "demo", "ADAPTER": "acme/legal", "TIMEOUT_S": str(timeout_s), **environment}
    return subprocess.run(
        [sys.executable, SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def test_an_answer_with_its_revision_passes():
    with answering((200, GOOD, USAGE)) as (url, asked):
        done = ask(url, API_KEY="secret")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"acme/legal {GOOD['x-prelude-revision']}: 8 tokens\n"
    (request,) = asked
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["adapter"], request["key"]) == ("demo", "acme/legal", "Bearer secret")


def test_what_is_wrong_fails():
    for status, headers, body, message in (
        (200, {}, USAGE, "names no revision"),
        (200, GOOD, {"usage": {"completion_tokens": 0}}, "no tokens"),
        (404, {}, {"error": {"code": "model_not_found"}}, "404: .*model_not_found"),
        (503, {}, {"error": {"code": "unavailable"}}, "no answer in time; the last one: 503"),
    ):
        with answering((status, headers, body)) as (url, _):
            done = ask(url)
        assert done.returncode == 1
        assert message.split(".*")[-1] in done.stderr, message


def test_it_waits_for_routers():
    with answering((503, {}, {}), (200, GOOD, USAGE)) as (url, asked):
        done = ask(url, timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert len(asked) == 2
