"""`prelude bench load` from its command line to its files, in one process and in two, without torch."""

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bench.streaming_mock import MockServer
from support.commands import Prelude
from support.in_thread import in_thread
from support.requirements import complaint_of_imports, needed_by

import cli.bench.load as command
from bench.errors import BenchError
from bench.load import document, options
from bench.load.generator import processes_for
from bench.load.process import Job, sessions_of
from bench.load.record import Record
from bench.load.run import introduction
from bench.workloads.workload import Stream
from cli.bench.arguments import recorded_command
from cli.main import _parser

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[MockServer]:
    with in_thread(MockServer(gap_s=0.001).running()) as mock:
        yield mock


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", "load", *words])


def load_of(*words: str) -> options.Load:
    return command.load_of(parsed("--url", "http://x/v1/", *words))


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The file of a load, and its records."""
    found = json.loads(path.read_text())
    return found, msgspec.convert(found["requests"], list[Record])


def test_a_load_from_the_command_line_to_its_files(server: MockServer, tmp_path: Path, prelude: Prelude, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    words = [
        *("bench", "load", "--url", server.url, "--num-requests", "12", "--concurrency", "3", "--adapters", "4"),
        *("--random-input-len", "16", "--random-output-len", "5", "--goodput", "ttft:60000", "e2e:60000"),
        *("--header", "x-team=hidden-value", "--warmup-requests", "2"),
        *("--json", str(tmp_path / "a.json")),
    ]
    shown = prelude.prints(*words)
    assert "12 of 12 requests" in shown
    assert "goodput (ttft 60000 ms, e2e 60000 ms)" in shown
    found, records = read(tmp_path / "a.json")
    assert len(records) == 12
    assert [len(each.token_s) for each in records] == [5] * 12
    assert found["summary"]["goodput"]["share"] == 1.0
    assert found["settings"]["adapter_field"] == "adapter"  # as the server said that it is ours
    assert {each["adapter"] for each in found["requests"]} == {"a0", "a1", "a2", "a3"}
    assert len(server.bodies) == 14  # with the warm-up, which is not in the file
    assert server.headers[0]["authorization"] == "Bearer secret-key"
    assert server.headers[0]["x-team"] == "hidden-value"
    text = (tmp_path / "a.json").read_text()
    assert "secret-key" not in text
    assert "hidden-value" not in text


def test_a_load_that_turns(server: MockServer, tmp_path: Path, prelude: Prelude):
    """The file has each phase's figures; one request more than the first phase has is of the second."""
    words = [
        *("bench", "load", "--url", server.url, "--phases", "16+2@200x0.1,4+6@100x0.1,16+2@5x0.2", "--processes", "2"),
        *("--goodput", "ttft:60000", "--warmup-requests", "0", "--json", str(tmp_path / "a.json")),
    ]
    shown = prelude.prints(*words)
    found, records = read(tmp_path / "a.json")
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(4, 6)] * 10 + [(16, 2)] * 21
    assert [each["summary"]["num_requests"] for each in found["phases"]] == [20, 10, 1]
    assert [each["summary"]["output_tokens"] for each in found["phases"]] == [40, 60, 2]
    assert [each["summary"]["goodput"]["share"] for each in found["phases"]] == [1.0] * 3
    assert found["summary"]["num_requests"] == 31
    assert [sum(low <= each.intended_s < low + 0.1 for each in records) for low in (0.0, 0.1)] == [20, 10]
    assert found["settings"]["requests_per_s"] == pytest.approx(31 / 0.4)
    assert "0.1 s: 4+6 tokens, 100 requests/s, 100.0% within the objectives, TTFT p50" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--duration-s", "3"), "lengths, rates and durations of its own; leave out --duration-s"),
        (("--random-input-len", "3", "--sweep"), "leave out --random-input-len, --sweep"),
        (("--workload", "punica"), "--phases: the lengths of punica are fixed"),
    ],
)
def test_phases_say_it_all(words: tuple[str, ...], says: str):
    with pytest.raises(BenchError, match=says):
        load_of("--phases", "4+2@1x1", *words)


@pytest.mark.parametrize("phases", ["", "4+2", "4+2@1", "4@1x1", "4+2@0x1", "4+2@1x1,", "4+2@1xnan"])
def test_a_phase_has_lengths_a_rate_and_a_duration(phases: str, capsys):
    with pytest.raises(SystemExit):
        load_of("--phases", phases)
    assert "is no phase, such as 2048+32@11x40: " in capsys.readouterr().err


def test_adapters_are_those_that_the_server_lists(server: MockServer, prelude: Prelude):
    server.adapters = tuple(f"acme/{number:02}" for number in range(12))
    words = ("bench", "load", "--url", server.url, "--num-requests", "9", "--concurrency", "1")
    words += ("--warmup-requests", "0", "--random-input-len", "8", "--random-output-len", "2", "--adapters")
    shown = prelude.prints(*words, "9")
    assert "9 adapters (round-robin; field `adapter`): acme/00, acme/01, acme/02, acme/03, acme/04" in shown
    assert "acme/07 and 1 more" in shown
    assert [body["adapter"] for body in server.bodies] == list(server.adapters[:9])
    prelude.refuses(*words, "13", says=f"13 adapters are asked for, but {server.url} lists 12; ask for fewer")
    prelude.prints(*words, "3", "--model", "mock", "--adapter-field", "adapter")  # which is asked all the same
    assert {body["adapter"] for body in server.bodies[9:]} == set(server.adapters[:3])
    prelude.prints(*words, "x,y", "--model", "mock")  # names are taken as they are
    assert {body["adapter"] for body in server.bodies[18:]} == {"x", "y"}


def test_a_server_that_answers_runs(server: MockServer, prelude: Prelude):
    """Whatever it answers: a wrong key is no reason to ask."""
    server.refusal = 401
    for url, says in ((server.url, "/v1/models answered 401: no key"), (server.url.replace("http:", "https:"), "SSL")):
        status, _, errors = prelude("bench", "load", "--url", url)
        assert (status, says in errors, "running" in errors) == (1, True, False)


def interrupt(server: MockServer) -> None:
    """Press Ctrl-C once it has requests."""
    while len(server.bodies) < 6:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("pace", "processes"), [(("--rate", "100"), "2"), (("--concurrency", "2"), "1")])
def test_ctrl_c_reports_what_there_is(server: MockServer, tmp_path: Path, prelude: Prelude, pace, processes: str):
    threading.Thread(target=interrupt, args=(server,), daemon=True).start()
    words = [
        *("bench", "load", "--url", server.url, "--duration-s", "3600", *pace, "--processes", processes),
        *("--random-input-len", "16", "--random-output-len", "3", "--json", str(tmp_path / "a.json")),
    ]
    assert "stopped before its end by Ctrl-C" in prelude.prints(*words)
    found, records = read(tmp_path / "a.json")
    assert found["generator"]["stopped_early"]
    assert len(records) >= 6
    assert all(each.error is None for each in records)  # those in flight came to their end


@pytest.mark.parametrize("more", [("--rate", "5"), ("--sweep", "--rate", "5", "--goodput", "ttft:5")])
def test_ctrl_c_in_the_warm_up_measures_nothing(server: MockServer, tmp_path: Path, more, prelude: Prelude):
    threading.Thread(target=interrupt, args=(server,), daemon=True).start()
    words = [
        *("bench", "load", "--url", server.url, "--warmup-requests", "1000000", "--duration-s", "1", *more),
        *("--random-input-len", "16", "--random-output-len", "3", "--json", str(tmp_path / "a.json")),
    ]
    prelude.refuses(*words, says="stopped by Ctrl-C in the warm-up")
    assert not (tmp_path / "a.json").exists()


def test_an_endpoint_that_is_down_is_an_error_or_counted(tmp_path: Path, prelude: Prelude):
    url = ["--url", "http://127.0.0.1:9", "--num-requests", "5", "--rate", "1000"]
    prelude.refuses("bench", "load", *url, says="Is it running")
    words = ("bench", "load", *url, "--model", "m", "--json", tmp_path / "a.json")
    shown = prelude.refuses(*words, says="prelude: every request failed\n")
    assert "5 of 5 requests FAILED: 5 unreachable" in shown
    assert read(tmp_path / "a.json")[0]["summary"]["errors"]["by_kind"] == {"unreachable": 5}


def test_a_header_goes_before_the_environments_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert load_of().endpoint.headers == {"authorization": "Bearer of-the-environment"}
    assert load_of("--header", "Authorization=Bearer own").endpoint.headers == {"Authorization": "Bearer own"}
    assert not load_of("--disable-ignore-eos").endpoint.ignore_eos


def test_defaults_are_the_workloads():
    load = load_of()
    assert (load.endpoint.url, load.concurrency, load.requests_per_s, load.num_requests) == ("http://x", 16, None, 256)
    load = load_of("--workload", "chat")
    assert (load.requests_per_s, load.num_requests) == (4.0, 400)
    assert len(load.endpoint.adapters) == 64
    load = load_of("--workload", "punica", "--rate", "2", "--duration-s", "9")
    assert (load.concurrency, load.requests_per_s, load.num_requests, load.duration_s) == (None, 2.0, None, 9.0)
    assert (load_of("--concurrency", "5").is_open, load_of("--rate", "5").is_open) == (False, True)


def test_names_of_other_tools():
    words = ("--num-prompts", "7", "--random-seed", "5", "--adapters", "x,y", "--lora-request-distribution", "skewed")
    load = load_of("--max-concurrency", "9", *words)
    assert (load_of("--request-rate", "3", *words).requests_per_s, load.concurrency) == (3.0, 9)
    assert (load.num_requests, load.seed, load.endpoint.adapters) == (7, 5, ("x", "y"))
    assert (load.workload.popularity.distribution, load.workload.popularity.alpha) == ("skewed", 1.5)
    for name in ("--url", "--base-url", "--target"):
        load = command.load_of(parsed(name, "http://there:1", "--max-requests", "7", "--max-seconds", "2.5"))
        assert (load.endpoint.url, load.num_requests, load.duration_s) == ("http://there:1", 7, 2.5)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "round-robin"),
        (("--lora-request-distribution", "zipf"), "zipf, alpha 1"),
        (("--workload", "databricks-prefill"), "zipf, alpha 1.44"),
        (("--workload", "databricks-prefill", "--lora-request-distribution", "uniform"), "uniform"),
    ],
)
def test_a_report_names_the_popularity_of_adapters(words: tuple[str, ...], named: str):
    load = load_of("--adapters", "4", *words)
    assert f"4 adapters ({named}; field" in introduction(load)
    text = document.described(load)["text"]
    assert "in turn" not in text
    assert ("--lora-request-distribution" in words) == text.endswith(f" Its adapters here: {named}.")


def test_an_objective_has_one_limit(prelude: Prelude):
    words = ("bench", "load", "--url", "http://127.0.0.1:9", "--goodput", "ttft:5", "ttft:6")
    assert prelude(*words) == (2, "", "prelude: --goodput ttft:5 ttft:6: one limit for each key\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--url", "x"), "begins with http"),
        (("--url", "http://a:b@c"), "password"),
        (("--url", "http://x", "--header", "a"), "NAME=VALUE"),
        (("--url", "http://x", "--workload", "punica", "--random-input-len", "2"), "lengths of punica are fixed"),
        (("--url", "http://x", "--lora-request-distribution", "zipf"), "there are no adapters"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], says: str):
    with pytest.raises(BenchError, match=says):
        command.load_of(parsed(*words))


@pytest.mark.parametrize(
    "words",
    [
        ("--goodput", "ttft"), ("--rate", "0"), ("--adapters", "a,,b"), ("--extra-request-body", "[]"),
        ("--head", "a=b"), ("--rate", "1", "--concurrency", "2"),
    ],
)  # fmt: skip
def test_what_argparse_refuses(words: tuple[str, ...]):
    """`--head` is no beginning of `--header`, whose value the recorded command hides."""
    with pytest.raises(SystemExit):
        parsed("--url", "http://x", *words)


def test_a_sweep_ends_with_what_it_knows_where_a_probe_has_too_few_requests(
    server: MockServer, tmp_path: Path, prelude: Prelude
):
    """One that holds nothing goes down, until a rate makes no request at all in the time."""
    files = ("--json", str(tmp_path / "s.json"))
    words = [
        *("bench", "load", "--url", server.url, "--sweep", "0.9", "--rate", "100", "--duration-s", "0.3"),
        *("--goodput", "e2e:0.0001", "--random-input-len", "8", "--random-output-len", "2"),
    ]
    shown = prelude.prints(*words, *files)
    assert "none is known to hold; the search ended early" in shown
    assert "10 are needed; give a longer --duration-s" in shown
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["probes"][0]["requests_per_s"] == 100
    assert "too few to judge" in found["ended"]
    prelude.refuses(*words, "--rate", "1", says="1 requests/s made 1 requests in 0.3 s, too few")


@pytest.mark.parametrize(
    "benchmark",
    ["load", *(pytest.param(each, marks=pytest.mark.slow) for each in ("matrix", "goodput", "simulate"))],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(benchmark: str, tmp_path: Path, prelude: Prelude):
    words = ["bench", benchmark, *(("--url", "http://127.0.0.1:9") if benchmark == "load" else ()), "--json"]
    for path, says in ((tmp_path / "no" / "a.json", "there is no folder"), (tmp_path, "is a folder; name a file")):
        prelude.refuses(*words, path, says=says, status=2)


def test_requests_are_made_one_by_one(monkeypatch):
    """Ten million prompts before the first one is sent would take minutes, after the clock has started."""
    load = load_of("--rate", "5", "--num-requests", "9")
    made = []
    original = Stream.completion
    monkeypatch.setattr(Stream, "completion", lambda *given: made.append(given[1]) or original(*given))
    sent = sessions_of(Job(load, 1, 3), load.stream())
    assert made == []
    assert [next(sent).number, next(sent).number] == [1, 4]
    assert made == [1, 4]


@pytest.mark.parametrize("workload", ["punica", "chat"])
@pytest.mark.parametrize("limits", [("--num-requests", "30"), ("--duration-s", "5")])
def test_processes_send_what_one_sends(workload: str, limits: tuple[str, str]):
    load = load_of("--workload", workload, "--rate", "5", *limits)
    stream = load.stream()
    shares = [list(islice(sessions_of(Job(load, index, 3), stream), 9)) for index in range(3)]
    whole = list(islice(sessions_of(Job(load), stream), 27))
    assert sorted((each for share in shares for each in share), key=lambda each: each.number) == whole


def test_there_are_no_more_processes_than_requests_in_flight():
    """One without a share of --concurrency would wait for ever, or leave out its part of the load."""
    with pytest.raises(BenchError, match="--processes 3: at most --concurrency, which is 2"):
        load_of("--concurrency", "2", "--processes", "3")
    with pytest.raises(BenchError, match="--processes 17: at most --concurrency, which is 16"):
        load_of("--processes", "17")


def test_processes_follow_the_events_of_an_open_loop(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(16)))
    assert processes_for(load_of("--rate", "10")) == 1
    assert processes_for(load_of("--rate", "100", "--random-output-len", "100")) == 3  # 10,000 events/s
    assert processes_for(load_of("--rate", "100000")) == 16
    assert processes_for(load_of("--phases", "1+1@1x9,1+100@100x1")) == 3  # enough for each phase
    assert processes_for(load_of()) == 1


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--header a=b --header=c=d --url http://h/v1", "--header=… --header=… --url http://h/v1"),
        ("--url http://u:secret@h:1/v1", "--url http://…@h:1/v1"),
        ("--json /x/y.json --model=../m", "--json y.json --model=m"),
        ("--adapters acme/legal,acme/tax --model meta/Llama", "--adapters acme/legal,acme/tax --model meta/Llama"),
        ('--extra-request-body {"stop":"/"}', '--extra-request-body {"stop":"/"}'),
    ],
)
def test_the_recorded_command_has_neither_secrets_nor_folders_but_every_name(words: str, shown: str):
    assert recorded_command(["bench", "load", *words.split(" ")]) == f"prelude bench load {shown}"


def test_it_installs_alone():
    """`pip install '.[bench]'` has all that the generator imports: neither torch nor an engine."""
    installed = needed_by("bench")
    assert not installed & {"torch", "sglang", "transformers"}
    modules = "cli.bench.load, bench.load.run, bench.load.process, bench.workloads.catalog"
    absent = ("engine", "cluster", "router", "grpc")
    assert complaint_of_imports(f"import {modules}", installed, absent) == ""
    assert "lacks ['uvloop']" in complaint_of_imports(f"import {modules}", installed - {"uvloop"}, absent)


def test_a_sweep_from_the_command_line(server: MockServer, tmp_path: Path, prelude: Prelude, monkeypatch):
    """Every rate holds an objective of a minute, so the sweep goes on to the highest one that it is allowed."""
    monkeypatch.setattr("cli.bench.load.MAX_SWEPT_RATE", 400.0)
    words = [
        *("bench", "load", "--url", server.url, "--sweep", "0.9", "--rate", "100", "--duration-s", "0.3"),
        *("--goodput", "e2e:60000", "--random-input-len", "8", "--random-output-len", "2"),
        *("--json", str(tmp_path / "s.json")),
    ]
    assert "at least 400 requests/s hold the objectives" in prelude.prints(*words)
    found = json.loads((tmp_path / "s.json").read_text())
    assert [probe["requests_per_s"] for probe in found["probes"]] == [100, 200, 400]
    assert (found["best_requests_per_s"], found["is_bounded"]) == (400, False)
    assert "requests" not in found
    assert len(server.bodies) > 3 * 10
    # No probe finds another's prompts in a cache.
    assert len({str(body) for body in server.bodies}) == len(server.bodies)
