"""What the admission benchmark sends, what it reports, and a run of it with real processes."""

from __future__ import annotations

import http.server
import threading
import time
from pathlib import Path

import pytest

from bench import admission
from bench.admission import Measurement, Options, Probe, summary, table
from bench.systems.costly_bodies import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, admitted, refused
from cluster.config.limits import RequestLimits
from router.errors import RequestError
from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate

TOKENIZER_PATHS = (TOKENIZE, DETOKENIZE)
LIMITS = Limits(128, 128_000, 131_072, RequestLimits())


@pytest.mark.slow
def test_bodies_are_refused_and_admitted_as_they_claim():
    for body in refused("m", 16 * 1024**2):
        assert len(body.body) <= 16 * 1024**2, body.name
        if body.path not in TOKENIZER_PATHS:
            with pytest.raises(RequestError):
                validate(Endpoint(body.path), body.body, LIMITS)
    bodies = admitted("m", 131_072, 128)
    assert {body.path for body in bodies} == {CHAT, COMPLETIONS, *TOKENIZER_PATHS}
    for body in bodies:
        if body.path not in TOKENIZER_PATHS:
            validate(Endpoint(body.path), body.body, LIMITS)


def test_a_probe_notices_a_server_that_stands_still():
    class Page(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        stands_still = False

        def do_GET(self) -> None:
            if Page.stands_still:
                Page.stands_still = False
                time.sleep(0.3)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Probe(server.server_port, "/").running() as probe:
        Page.stands_still = True
        while Page.stands_still:
            time.sleep(0.01)
    server.shutdown()
    assert 300 <= probe.longest_ms < 5000


def test_rows_are_medians_of_the_repeats():
    measured = [
        Measurement("router", "x", 7, repeat, 400, 0.1, router_ms, None, 1.0)
        for repeat, router_ms in enumerate((5.0, 90.0, 7.0))
    ]
    measured.append(Measurement("engine", "x", 7, 0, 200, 0.1, 3.0, 44.0, 0.5))
    rows = summary(measured)
    assert [(row["part"], row["router_ms"], row["engine_ms"]) for row in rows] == [
        ("router", 7.0, None),
        ("engine", 3.0, 44.0),
    ]
    assert "44.0 ms" in table({"bodies": rows})


@pytest.mark.slow
def test_a_run_with_a_real_router(tmp_path: Path):
    options = Options(repeats=1, engine=False, only=("stop strings", "unknown fields"))
    document = admission.run(options, "prelude bench admission", tmp_path / "found.json", lambda _: None)
    found = {row["body"]: row["status"] for row in document["bodies"]}
    assert found == {"nothing": [200], "unknown fields": [400], "stop strings": [400], "32 stop strings": [200]}
    assert (tmp_path / "found.json").is_file()
