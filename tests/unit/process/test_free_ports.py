"""Ports that are free, and that no outgoing connection is given."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from process import free_ports
from process.free_ports import bound_socket, free_port


def test_a_bound_port_is_held_until_it_is_closed():
    with bound_socket() as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port), reuse_port=False)
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("first", ["32768", "20480"])
def test_a_port_is_none_that_the_kernel_gives(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "range").write_text(f"{first}\t60999\n")
    monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert 10240 <= min(ports) <= max(ports) < int(first)


def test_ports_that_are_chosen_before_anybody_listens_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "range").write_text("32768\t60999\n")
    monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
    random.seed(1)
    first = {free_port() for _ in range(300)}
    random.seed(1)
    assert len(first | {free_port() for _ in range(300)}) == 600


CHOOSES = """
import random, sys
from process import free_ports
free_ports._random = random.Random(1)
print(*(free_ports.free_port() for _ in range(20)), flush=True)
sys.stdin.read()
"""


def test_two_processes_choose_different_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before anybody listens: test runs side by side start servers that take seconds to be there."""
    monkeypatch.setattr(free_ports, "_random", random.Random(1))
    with subprocess.Popen([sys.executable, "-c", CHOOSES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = {int(each) for each in other.stdout.readline().split()}
        ours = {free_port() for _ in range(20)}
        assert (len(theirs), ours & theirs) == (20, set())
        other.communicate()
    free_ports._random.seed(1)
    assert {free_port() for _ in range(20)} & theirs  # it has ended


@pytest.mark.parametrize("content", ["1024 65000", "", None])
def test_without_room_below_the_kernel_chooses(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
    if content is not None:
        (tmp_path / "range").write_text(content)
    assert free_port() > 0
