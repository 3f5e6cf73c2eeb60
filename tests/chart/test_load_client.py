"""The client of `make test-kind` notices each kind of failed request, here at a server that fails some."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.chart import load_client
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


class Server(ThreadingHTTPServer):
    """Answers as a router, but for the faults, each of which it has once, when a question has had its right answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.left = list(FAULTS)
        self.asked: Counter[str] = Counter()  # by question
        self.lock = threading.Lock()

    def next_fault(self, question: str, is_stream: bool) -> str:
        with self.lock:
            self.asked[question] += 1
            for each in self.left if self.asked[question] > 1 else ():
                if each[0] == is_stream:
                    self.left.remove(each)
                    return each[1]
        return ""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_stream = asked["stream"]
        fault = self.server.next_fault(asked["messages"][0]["content"], is_stream)
        if fault == "closed":
            self.close_connection = True
            return
        text = "Go away." if fault == "other text" else GOOD
        if is_stream:
            parts = [{"choices": [{"delta": {"content": text[:5]}}]}, {"choices": [{"delta": {"content": text[5:]}}]}]
            if fault == "error event":
                parts[1] = {"error": {"message": "the engine has died"}}
            lines = [json.dumps(each) for each in parts] + ["[DONE]"] * (fault != "ends early")
            data = "".join(f"data: {line}\n\n" for line in lines).encode()
        else:
            whole = {"choices": [{"message": {"content": text}}]}
            data = json.dumps({"error": {"message": "no"}} if fault == "error" else whole).encode()
        self.send_response(503 if fault == "status" else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:-7] if fault == "cut" else data)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def test_it_notices_each_failed_request(server: Server, tmp_path: Path) -> None:
    """As the pod runs it: its source and two arguments."""
    stop = tmp_path / "stop"
    source, url = Path(load_client.__file__).read_text(), f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    with subprocess.Popen([sys.executable, "-c", source, url, stop], stdout=subprocess.PIPE, text=True) as client:
        try:
            wait_until(lambda: not server.left)
            enough = server.asked.total() + 4 * load_client.NUM_THREADS
            wait_until(lambda: server.asked.total() >= enough)
        finally:
            stop.touch()
        printed, _ = client.communicate(timeout=60)
    assert len(printed.splitlines()) == server.asked.total()
    wrong = load_client.wrong_answers(printed)
    left = list(wrong)
    for fault, said in FAULTS.items():
        found = [each for each in left if all(word in each for word in said.split(" ", 1))]
        assert found, f"nothing is said of {fault}; {wrong}"
        left.remove(found[0])
    assert left == []


def test_a_client_that_asked_nothing_is_no_success() -> None:
    with pytest.raises(AssertionError, match="has asked nothing"):
        load_client.wrong_answers("")
