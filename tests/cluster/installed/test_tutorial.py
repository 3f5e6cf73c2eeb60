"""The commands of docs/tutorial-train-and-serve.md, as they stand there, one after the other."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.clusters.pretrained_model import needs_pretrained
from support.clusters.running_cluster import is_ready
from support.training.served_answers import compared_answers

from process.free_ports import free_port

PAGE = Path(__file__).parents[3] / "docs" / "tutorial-train-and-serve.md"
COMMAND_WITHIN_S = 3000.0
READY_WITHIN_S = 600.0
STOPPED_WITHIN_S = 60.0
NEARLY_ALL, NEARLY_NONE = 0.9, 0.1


def commands_of_page() -> list[str]:
    """One for each section."""
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)]


class Desk:
    """The folder in which a reader of the page works, with a port of its own in place of the page's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self._environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(self, command: str) -> str:
        """What the command prints; it has to succeed."""
        done = subprocess.run(
            ["bash", "-c", command.replace("http://127.0.0.1:8000", self.url)],
            cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=COMMAND_WITHIN_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, command: str) -> subprocess.Popen:
        """Start the cluster; returns when it is ready."""
        config = self._folder / "tutorial" / "cluster.yaml"
        port = self.url.rpartition(":")[2]
        config.write_text(config.read_text().replace("router:\n", f"router:\n  port: {port}\n"))
        log = (self._folder / "up.log").open("wb")
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self._folder, env=self._environment, stdout=log, stderr=log
        )
        log.close()
        deadline = time.monotonic() + READY_WITHIN_S
        while not is_ready(f"{self.url}/ready"):
            assert process.poll() is None, (self._folder / "up.log").read_text()
            assert time.monotonic() < deadline, (self._folder / "up.log").read_text()
            time.sleep(0.2)
        return process


def answer_in(printed: str) -> str:
    return json.loads(printed)["choices"][0]["message"]["content"]


def exact_matches(printed: str) -> list[float]:
    """Of the base model, and of each adapter."""
    return [float(line.split()[-1]) for line in printed.splitlines()[2:]]


@pytest.mark.long
@needs_pretrained
@pytest.mark.timeout(6 * 3600)
def test_ten_commands_from_rows_to_a_rollback(tmp_path: Path):
    make, base, train, evaluate, up, take_in, ask, replace, rollback, history = commands_of_page()
    desk = Desk(tmp_path)
    desk.run(make)
    [alone] = exact_matches(desk.run(base))
    assert alone <= NEARLY_NONE
    desk.run(train)
    without, trained = exact_matches(desk.run(evaluate))
    assert without == alone
    assert trained >= NEARLY_ALL
    cluster = desk.start(up)
    try:
        assert "r1" in desk.run(take_in)
        [promised] = re.findall(r"^The answer is `(.*?)`", PAGE.read_text(), re.MULTILINE)
        plain_request = ask.replace('"adapter": "tutor", ', "")
        plain = answer_in(desk.run(plain_request))
        assert answer_in(desk.run(ask)) == promised != plain

        rows = tmp_path / "rows.jsonl"
        held_out = (tmp_path / "tutorial/data/json-held-out.jsonl").read_text().splitlines(keepends=True)
        rows.write_text("".join(held_out[:20]))  # those that were evaluated
        adapters = [None, ("tutor", tmp_path / "runs/json/last")]
        served = compared_answers(desk.url, tmp_path / "tutorial/model", rows, adapters)
        assert [each.exact_match for each in served] == pytest.approx([alone, trained], abs=0.01)
        assert all(each.served == each.offline for each in served)

        desk.run(replace)
        replaced = answer_in(desk.run(ask))
        assert replaced not in (promised, plain)

        desk.run(rollback)
        assert answer_in(desk.run(ask)) == promised
        assert answer_in(desk.run(ask.replace('"tutor"', '"tutor@r2"'))) == replaced
        assert answer_in(desk.run(plain_request)) == plain
        assert re.findall(r"(\w+) -> (\w+)", desk.run(history)) == [("r2", "r1"), ("r1", "r2"), ("new", "r1")]
    finally:
        cluster.send_signal(signal.SIGINT)
        try:
            cluster.wait(STOPPED_WITHIN_S)
        finally:
            cluster.kill()
