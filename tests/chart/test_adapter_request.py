"""What `helm test` runs, against a server that answers as a router does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from support.bench.streaming_mock import MockServer
from support.in_thread import in_thread

SCRIPT = Path(__file__).parents[2] / "helm" / "files" / "adapter_request.py"
GOOD = {"x-prelude-adapter": "acme/legal", "x-prelude-revision": "sha256:" + "1" * 64}
USAGE = {"usage": {"completion_tokens": 8}}


def asked(
    *answers: tuple[int, dict[str, str], dict[str, Any]], timeout_s: float = 1.0
) -> tuple[subprocess.CompletedProcess[str], MockServer]:
    """Its end, and the server that it has asked, which gives its last answer again and again."""
    left = list(answers)

    async def answer(_server: MockServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        status, headers, found = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response(found, status=status, headers=headers)

    with in_thread(MockServer(answer).running()) as server:
        variables = {"URL": server.url, "MODEL": "demo", "ADAPTER": "acme/legal", "API_KEY": "secret"}
        variables |= {"TIMEOUT_S": str(timeout_s)}
        words = [sys.executable, SCRIPT]
        return subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True), server


def test_an_answer_with_its_revision_passes():
    done, server = asked((200, GOOD, USAGE))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"acme/legal {GOOD['x-prelude-revision']}: 8 tokens\n"
    (request,), (headers,) = server.bodies, server.headers
    assert (request["model"], request["adapter"], headers["authorization"]) == ("demo", "acme/legal", "Bearer secret")


def test_what_is_wrong_fails():
    for status, headers, body, message in (
        (200, {}, USAGE, "names no revision"),
        (200, GOOD, {"usage": {"completion_tokens": 0}}, "no tokens"),
        (404, {}, {"error": {"code": "model_not_found"}}, "model_not_found"),
        (503, {}, {"error": {"code": "unavailable"}}, "no answer in time; the last one: 503"),
    ):
        done, _ = asked((status, headers, body))
        assert done.returncode == 1
        assert message in done.stderr, message


def test_it_waits_for_routers():
    done, server = asked((503, {}, {}), (200, GOOD, USAGE), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert len(server.bodies) == 2
