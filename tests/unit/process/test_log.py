"""The log stops no process: lines that nobody reads are dropped whole, and counted."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_LINES = 1000
LOGGER = """
import logging, sys
from process import log

log.setup("router")
logger = logging.getLogger("test")
for number in range(int(sys.argv[1])):
    fields = {"number": number, "text": "x" * (6000 - number)}  # not in one piece
    if number % 2:
        log.info(logger, "request", fields)
    else:
        logger.warning("request", extra={"fields": fields})
print("done", flush=True)
sys.stdin.readline()
logger.info("after")
logger.info("the last")
"""


def written_to(pipe: int) -> bytes:
    """What is in a pipe now."""
    os.set_blocking(pipe, False)
    found = bytearray()
    with contextlib.suppress(BlockingIOError):
        while read := os.read(pipe, 2**16):
            found += read
    os.set_blocking(pipe, True)
    return bytes(found)


def started(stderr: Any) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", LOGGER, str(NUM_LINES)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)


@pytest.fixture
def logger() -> Any:
    with started(subprocess.PIPE) as process:
        yield process
        process.kill()


def test_what_nobody_reads_is_dropped_whole_and_counted(logger: Any):
    assert logger.stdout.readline() == b"done\n"  # never, if it waited for a reader
    read = written_to(logger.stderr.fileno())  # may end in the middle of a line
    _, rest = logger.communicate(b"\n")
    lines = [json.loads(line) for line in (read + rest).splitlines()]
    assert logger.returncode == 0
    *kept, dropped, after, last = lines
    assert [line["number"] for line in kept] == list(range(len(kept)))
    assert all(len(line["text"]) == 6000 - line["number"] for line in kept)
    assert len(read) > 2**19  # a pipe has an eighth of that by default
    assert (dropped["level"], dropped["lines"]) == ("warning", NUM_LINES - len(kept))
    assert (after["message"], after["process"], last["message"]) == ("after", "router", "the last")


def test_a_reader_that_has_gone_is_no_error(logger: Any):
    logger.stderr.close()
    assert logger.stdout.readline() == b"done\n"


def test_a_file_has_every_line(tmp_path: Path):
    with (tmp_path / "log").open("wb") as log, started(log) as process:
        process.communicate(b"\n")
    lines = [json.loads(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [line.get("number") for line in lines] == [*range(NUM_LINES), None, None]
