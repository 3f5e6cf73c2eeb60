"""The client of `make test-kind` notices each kind of failed request, here at a server that fails some."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.bench.streaming_mock import MockServer
from support.chart import load_client
from support.in_thread import in_thread
from support.waiting import wait_until

GOOD = "How can I help?"
# What a server does once, by whether it is asked for a stream, and what the client says of that.
FAULTS = {
    (False, "status"): "HTTPError 503",
    (True, "status"): "HTTPError 503",
    (False, "closed"): "RemoteDisconnected",
    (True, "closed"): "RemoteDisconnected",
    (False, "cut"): "IncompleteRead",
    (True, "cut"): "IncompleteRead",
    (True, "ends early"): "not a whole answer",
    (True, "error event"): "not a whole answer",
    (False, "error"): "not a whole answer",
    (False, "other text"): "another answer than the first",
    (True, "other text"): "another answer than the first",
}


def test_it_notices_each_failed_request(tmp_path: Path) -> None:
    """As the pod runs it: its source and two arguments. Each fault comes when a question has had its right answer."""
    left, asked = list(FAULTS), Counter[str]()

    async def answer(_server: MockServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        question, is_stream, fault = body["messages"][0]["content"], body["stream"], ""
        asked[question] += 1
        if asked[question] > 1 and (faults := [each for each in left if each[0] == is_stream]):
            left.remove(faults[0])
            fault = faults[0][1]
        text = "Go away." if fault == "other text" else GOOD
        if is_stream:
            parts = [{"choices": [{"delta": {"content": each}}]} for each in (text[:5], text[5:])]
            if fault == "error event":
                parts[1] = {"error": {"message": "the engine has died"}}
            lines = [json.dumps(each) for each in parts] + ["[DONE]"] * (fault != "ends early")
            data = "".join(f"data: {line}\n\n" for line in lines)
        else:
            whole = {"choices": [{"message": {"content": text}}]}
            data = json.dumps({"error": {"message": "no"}} if fault == "error" else whole)
        response = web.StreamResponse(status=503 if fault == "status" else 200)
        response.content_length = len(data)
        assert request.transport is not None
        if fault != "closed":
            await response.prepare(request)
            await response.write(data[:-7].encode() if fault == "cut" else data.encode())
        if fault in ("closed", "cut"):
            request.transport.close()
        return response

    stop, source = tmp_path / "stop", Path(load_client.__file__).read_text()
    with in_thread(MockServer(answer).running()) as server:
        command = [sys.executable, "-c", source, f"{server.url}/v1/chat/completions", stop]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                wait_until(lambda: not left)
                enough = asked.total() + 4 * load_client.NUM_THREADS
                wait_until(lambda: asked.total() >= enough)
            finally:
                stop.touch()
            printed, _ = client.communicate(timeout=60)
    assert len(printed.splitlines()) == asked.total()
    wrong = load_client.wrong_answers(printed)
    for fault, said in FAULTS.items():
        found = [each for each in wrong if all(word in each for word in said.split(" ", 1))]
        assert found, f"nothing is said of {fault}; {wrong}"
        wrong.remove(found[0])
    assert wrong == []


def test_a_client_that_asked_nothing_is_no_success() -> None:
    with pytest.raises(AssertionError, match="has asked nothing"):
        load_client.wrong_answers("")
