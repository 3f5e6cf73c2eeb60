"""Processes that import, push, move, roll back, delete, restore and collect garbage are killed at random instants.

Afterwards the catalog is exactly as the journals say, but for the one call of each process that had not returned, which
happened or did not; and the store has the bytes, whole, of everything that the catalog refers to.
"""

import collections
import itertools
import json
import multiprocessing
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.adapters.library_worker import View, names_of, view_of, work
from support.adapters.random_adapters import write_random_lora
from support.adapters.s3_server import BUCKET
from support.adapters.stored_objects import num_incoming
from support.adapters.tiny_model import write_model_config

from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import open_store

pytestmark = pytest.mark.slow

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["adapters.library", "s3fs", "pytest"])  # else each process imports them
NUM_WORKERS = 3  # that work at the same time
OFTEN_INTERRUPTED = ("import", "collect", "alias", "rollback", "delete")
MOST_LINES = 8  # that a worker adds to its journal from one kill to the next


class Journal:
    """The calls of one worker and their outcomes, and what its adapters are after them."""

    def __init__(self, path: Path, worker: int, contents: dict[str, str]):
        self._path, self._read_bytes, self._contents = path, 0, contents
        self.views: dict[str, View] = dict.fromkeys(names_of(worker))
        self._before_deletion: dict[str, View] = {}
        self.outcomes: collections.Counter[str] = collections.Counter()  # change and outcome -> how often

    def new_lines(self) -> list[bytes]:
        """Those that are not taken in yet."""
        return self._path.read_bytes()[self._read_bytes :].splitlines(keepends=True) if self._path.exists() else []

    def take_in(self) -> dict | None:
        """Checks what was added. The change that had been begun and not returned, if there is one."""
        lines = self.new_lines()
        self._read_bytes += sum(map(len, lines))
        begun = None
        for line in map(json.loads, lines):
            if "begin" in line:
                begun = line["begin"]
                continue
            assert begun is not None
            self._check(begun, line["outcome"], line["view"])
            begun = None
        return begun

    def _check(self, change: dict, outcome: int | str | None, view: View) -> None:
        kind, is_refusal = change["change"], isinstance(outcome, str)
        self.outcomes[f"{kind}: {outcome}" if is_refusal else kind] += 1
        if kind == "collect":
            assert outcome == "CatalogConflict" or not is_refusal, outcome
            self.outcomes["removed"] += 0 if isinstance(outcome, str) else outcome or 0
            return
        before = self.views[change["name"]]
        if is_refusal:
            assert view == before, f"{change}, refused with {outcome}, made {view} of {before}"
            assert view is None or kind == "rollback" or outcome == "RevisionBeingRemoved", (change, outcome, view)
        else:
            assert self.may_follow(change, view, outcome), f"{change}, answered with {outcome}, made {view} of {before}"
        self.see(change["name"], view)

    def see(self, name: str, view: View) -> None:
        self.views[name] = view
        if view is not None:  # if there is none, only what is done next tells whether it has been purged
            self._before_deletion[name] = view

    def may_follow(self, change: dict, view: View, outcome: int | None = None) -> bool:
        """Whether a change that was made makes this of what its adapter was; `outcome`: the number that it returned."""
        name, before = change["name"], self.views[change["name"]]
        match change["change"]:
            case "delete":
                return before is not None and view is None
            case "restore":
                return view is not None and view == self._before_deletion.get(name)
        if view is None:
            return False
        old = before or {"revisions": {}, "aliases": {}}
        if change["change"] == "import":
            content = self._contents[change["content"]]
            number = next((number for number, each in view["revisions"].items() if each == content), "0")
            is_known_or_newest = number in old["revisions"] or int(number) > max(map(int, old["revisions"]), default=0)
            is_right = outcome in (None, int(number)) and is_known_or_newest
            moved = {"latest": int(number)} if change["moves_latest"] or "latest" not in old["aliases"] else {}
            wanted = {"revisions": {**old["revisions"], number: content}, "aliases": {**old["aliases"], **moved}}
            return is_right and view == wanted
        alias = change["alias"]
        number = view["aliases"].get(alias)
        is_right = outcome in (None, number) and change.get("number", number) == number
        wanted = {"revisions": old["revisions"], "aliases": {**old["aliases"], alias: number}}
        return is_right and str(number) in old["revisions"] and view == wanted


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [9, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_kills_tear_nothing_and_lose_nothing(place, num_kills, database, catalog, tmp_path, request):
    access = request.getfixturevalue("s3") if place == "s3" else None
    base = BaseModel.read(write_model_config(tmp_path / "model", hidden_size=256, intermediate_size=512))
    for folder in ("sources", "journals", "scratch"):
        (tmp_path / folder).mkdir()
    contents = {}  # name of a directory -> its revision id
    for seed in range(16):
        source = write_random_lora(tmp_path / "sources" / str(seed), base, seed, rank=1 if seed % 2 else 32)
        contents[source.name] = revision_id_of(read_adapter(source, base, Limits()))
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}" if access else f"file://{tmp_path}/store", access)
    library = AdapterLibrary(catalog, store, base, Limits(), "bfloat16")
    settings = {name: str(tmp_path / name) for name in ("model", "sources", "journals", "scratch")}
    settings |= {"catalog": database.url, "store": store.url, "s3": access}
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    instants = random.Random(seed)
    journals = [Journal(tmp_path / "journals" / str(worker), worker, contents) for worker in range(NUM_WORKERS)]
    interrupted: collections.Counter[str] = collections.Counter()
    num_happened = num_left_over = 0

    for kill in itertools.count():
        outcomes = sum((journal.outcomes for journal in journals), collections.Counter())
        is_enough = outcomes["import"] > num_kills / 3 and sum(interrupted.values()) > num_kills / 3
        is_enough = is_enough and (num_kills < 100 or all(interrupted[change] for change in OFTEN_INTERRUPTED))
        if kill * NUM_WORKERS >= (num_kills if is_enough else 4 * num_kills):
            break
        running = [PROCESSES.Process(target=work, args=(each, settings), daemon=True) for each in range(NUM_WORKERS)]
        for process in running:
            process.start()
        for process, journal in zip(running, journals, strict=True):
            kill_at_an_instant(process, journal, instants)
            process.join()
            assert process.exitcode == -signal.SIGKILL, "a worker ended by itself; its error is above"
        for journal in journals:
            begun = journal.take_in()
            if begun is not None:
                interrupted[begun["change"]] += 1
            num_happened += check_catalog(catalog, journal, begun)
        is_repairing = kill % 3 == 2
        report = library.fsck(0, repair=is_repairing)
        assert report.is_sound, report
        num_left_over += is_repairing * (report.left_over.count + report.unreferenced.count)
        if is_repairing:
            after = library.fsck(0)
            assert (after.unreferenced.count, after.left_over.count) == (0, 0)
            assert num_incoming(store) == 0
            assert after.num_objects == after.num_referenced == len(list(catalog.referenced_revisions()))
    print(f"{kill * NUM_WORKERS} kills; interrupted {dict(interrupted)}, of which {num_happened} had happened")
    print(f"returned {dict(outcomes)}; {num_left_over} leftovers repaired")
    assert is_enough  # else nothing was killed while it worked
    if num_kills >= 100:
        for change in ("import", "alias", "rollback", "delete", "restore", "collect", "removed"):
            assert outcomes[change], change
        assert num_happened
        assert num_left_over


def kill_at_an_instant(process: BaseProcess, journal: Journal, instants: random.Random) -> None:
    """After a random number of lines, and within about the time of one: as late on a slow machine as in its work."""
    began, num_lines = time.monotonic(), instants.randint(0, MOST_LINES)
    last = len(journal.new_lines()) + num_lines
    while process.is_alive() and len(journal.new_lines()) < last:
        time.sleep(0.002)
    time.sleep(instants.uniform(0, (time.monotonic() - began) / max(1, num_lines)))
    process.kill()


def check_catalog(catalog: SqlCatalog, journal: Journal, begun: dict | None) -> bool:
    """The catalog has what the journal says. Takes over whether what had been begun has happened, and returns it."""
    happened = False
    for name, before in journal.views.items():
        found = view_of(catalog, name)
        if found == before:
            continue
        assert begun is not None, f"{name} is {found}, and was {before} when its worker was idle"
        may_be = begun.get("name") == name and journal.may_follow(begun, found)
        assert may_be, f"{name} is {found}, and was {before} before {begun} was begun"
        journal.see(name, found)
        happened = True
    return happened
