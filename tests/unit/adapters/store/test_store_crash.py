"""Publishers and readers that are killed: a revision is in the store whole or not at all, and no file is torn."""

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from support.adapters.s3_server import BUCKET
from support.adapters.stored_objects import num_incoming

from adapters.store import AdapterStore, S3Access, open_store
from adapters.store.fsck import fsck

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]

# Forks a process for each line that it reads, which publishes and fetches until it is killed. Says which process it
# is, once that is connected to the store, what it has published, and when it is gone.
PUBLISHER = """
import hashlib, json, os, sys
from pathlib import Path
from adapters.store import S3Access, open_store

url, access, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
sources = sorted((folder / "sources").iterdir())
if access:
    import s3fs  # before the forks, each of which would import it

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def publish_for_ever(seed):
    store, number = open_store(url, S3Access(**access) if access else None), 0
    store.exists("sha256:" + "0" * 64)
    say("pid", os.getpid())
    while True:
        revision_id = "sha256:" + hashlib.sha256(f"{seed} {number % 7}".encode()).hexdigest()
        source = sources[(seed + number % 7) % len(sources)]
        store.publish(revision_id, source)
        say("published", revision_id)
        store.fetch(revision_id, folder / "fetched" / source.name)
        number += 1

for seed, _ in enumerate(sys.stdin):
    child = os.fork()
    if not child:
        publish_for_ever(seed)
    os.waitpid(child, 0)
    say("gone")
"""


class Publisher:
    """A process that publishes and is killed, again and again."""

    def __init__(self, url: str, access: S3Access | None, folder: Path) -> None:
        options = json.dumps({} if access is None else asdict(access))
        self._process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, url, options, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def publish_and_die(self, delay_s: float) -> set[str]:
        """Publishes for so long and is killed. The revisions that it has said to be published."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        child = int(self._said("pid"))
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        published = set()
        while revision_id := self._said("published", or_else="gone"):
            published.add(revision_id)
        return published

    def _said(self, word: str, or_else: str | None = None) -> str:
        """What stands after `word` on the next line; "" for the line `or_else`."""
        assert self._process.stdout is not None
        said, _, rest = self._process.stdout.readline().rstrip("\n").partition(" ")
        assert said in (word, or_else), f"the publisher said {said!r}, not {word!r}"
        return rest

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextmanager
def publisher(url: str, access: S3Access | None, folder: Path) -> Iterator[Publisher]:
    process = Publisher(url, access, folder)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize(
    ("place", "num_kills"),
    [
        ("folder", 30),
        ("s3", 15),
        pytest.param("folder", 500, marks=pytest.mark.long),
        pytest.param("s3", 200, marks=pytest.mark.long),
    ],
)
def test_kills_leave_whole_revisions_or_nothing(place, num_kills, tmp_path, request):
    access = request.getfixturevalue("s3") if place == "s3" else None
    url = f"s3://{BUCKET}/{tmp_path.name}" if access else f"file://{tmp_path}/store"
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    delays = random.Random(seed)
    (tmp_path / "sources").mkdir()
    for size in (1_000, 300_000, 2_000_000):
        content = os.urandom(size)
        (tmp_path / "sources" / hashlib.sha256(content).hexdigest()).write_bytes(content)
    store = open_store(url, access)
    num_interrupted = num_published = 0
    with publisher(url, access, tmp_path) as process:
        for kill in itertools.count():
            # What a kill meets is chance, and a fast disk makes publishing rare: some go on until enough was met.
            is_enough = num_published > num_kills / 2 and num_interrupted > num_kills / 10
            if kill >= (num_kills if is_enough else 6 * num_kills):
                break
            published = process.publish_and_die(delays.uniform(0, 0.4 if access else 0.1))
            num_published += len(published)
            num_interrupted += num_incoming(store) > 0
            check_after_a_kill(store, published, tmp_path / "fetched")
    assert is_enough, f"{num_published} were published, and {num_interrupted} kills met a publisher at it"


def check_after_a_kill(store: AdapterStore, published: set[str], fetched: Path) -> None:
    """What was said to be published is there, nothing is damaged, and a clean-up leaves nothing behind."""
    report = fsck(store, sorted(published), min_age_s=0)
    assert report.is_sound, report
    assert report.unreferenced.count <= 1  # the one whose publisher could not say so any more
    for path in fetched.glob("[!.]*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert fsck(store, [], min_age_s=0, repair=True, check_content=False).num_repaired == (
        report.num_objects + report.left_over.count
    )
    assert list(store.list()) == []
    assert num_incoming(store) == 0
