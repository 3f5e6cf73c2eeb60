"""Processes that import, push, move, roll back, delete, restore and collect garbage are killed at random instants.

Afterwards the catalog is exactly as the journals say, but for the one call of each process that had not returned, which
happened or did not; and the store has the bytes, whole, of everything that the catalog refers to.
"""

from __future__ import annotations

import collections
import itertools
import json
import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest
from support.adapters.adapter_model import ModelOfAdapter
from support.adapters.library_worker import names_of, work
from support.adapters.random_adapters import write_random_lora
from support.adapters.s3_server import BUCKET
from support.adapters.stored_objects import num_incoming
from support.adapters.tiny_model import write_model_config

from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound
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
LONGEST_S = {"folder": 0.6, "s3": 1.5}  # from one kill to the next


class Journal:
    """The calls of one worker and their outcomes, and what its adapters must be after them."""

    def __init__(self, path: Path, worker: int):
        self._path, self._read_bytes = path, 0
        self.adapters = {name: ModelOfAdapter() for name in names_of(worker)}
        self.outcomes: collections.Counter[str] = collections.Counter()  # change and outcome -> how often

    def take_in(self) -> dict | None:
        """Replays what was added. The change that had been begun and not returned, if there is one."""
        lines = self._path.read_bytes()[self._read_bytes :] if self._path.exists() else b""
        self._read_bytes += len(lines)
        begun = None
        for line in map(json.loads, lines.splitlines()):
            if "begin" in line:
                begun = line["begin"]
                continue
            assert begun is not None
            self._replay(begun, line["outcome"])
            begun = None
        return begun

    def _replay(self, change: dict, outcome: int | str | None) -> None:
        is_refusal = isinstance(outcome, str)
        self.outcomes[f"{change['change']}: {outcome}" if is_refusal else change["change"]] += 1
        if change["change"] == "collect":
            assert outcome == "CatalogConflict" or not is_refusal, outcome
            self.outcomes["removed"] += 0 if isinstance(outcome, str) else outcome or 0
            return
        adapter = self.adapters[change["name"]]
        if isinstance(outcome, str):
            after = adapter.after_refusal(change, outcome)
            assert after is not None, f"{change} was refused with {outcome}; the adapter was {adapter}"
        else:
            ((after, expected),) = adapter.after(change) or [(None, "a refusal")]
            assert after is not None
            assert outcome == expected, f"{change} returned {outcome}, not {expected}; the adapter was {adapter}"
        self.adapters[change["name"]] = after


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [9, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_kills_tear_nothing_and_lose_nothing(place, num_kills, database, catalog, tmp_path, request):
    access = request.getfixturevalue("s3") if place == "s3" else None
    base = BaseModel.read(write_model_config(tmp_path / "model", hidden_size=256, intermediate_size=512))
    for folder in ("sources", "journals", "scratch"):
        (tmp_path / folder).mkdir()
    contents = {}  # revision id -> name of its directory
    for seed in range(16):
        source = write_random_lora(tmp_path / "sources" / str(seed), base, seed, rank=1 if seed % 2 else 32)
        contents[revision_id_of(read_adapter(source, base, Limits()))] = source.name
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}" if access else f"file://{tmp_path}/store", access)
    library = AdapterLibrary(catalog, store, base, Limits(), "bfloat16")
    settings = {name: str(tmp_path / name) for name in ("model", "sources", "journals", "scratch")}
    settings |= {"catalog": database.url, "store": store.url, "s3": access}
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    instants = random.Random(seed)
    journals = [Journal(tmp_path / "journals" / str(worker), worker) for worker in range(NUM_WORKERS)]
    interrupted: collections.Counter[str] = collections.Counter()
    num_happened = num_left_over = 0

    for kill in itertools.count():
        outcomes = sum((journal.outcomes for journal in journals), collections.Counter())
        # A busy machine has few changes between two kills: then there are more kills, after more time.
        is_enough = outcomes["import"] > num_kills / 3 and sum(interrupted.values()) > num_kills / 3
        is_enough = is_enough and (num_kills < 100 or all(interrupted[change] for change in OFTEN_INTERRUPTED))
        if kill * NUM_WORKERS >= (num_kills if is_enough else 4 * num_kills):
            break
        longest_s = LONGEST_S[place] * max(1, kill * NUM_WORKERS / num_kills)
        running = [PROCESSES.Process(target=work, args=(each, settings), daemon=True) for each in range(NUM_WORKERS)]
        for process in running:
            process.start()
        for process in running:
            time.sleep(instants.uniform(0, longest_s))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "a worker ended by itself; its error is above"
        for journal in journals:
            begun = journal.take_in()
            if begun is not None:
                interrupted[begun["change"]] += 1
            num_happened += check_catalog(catalog, journal, begun, contents)
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
    assert outcomes["import"] > num_kills / 3
    assert sum(interrupted.values()) > num_kills / 3  # else nothing was killed while it worked
    if num_kills >= 100:
        for change in ("import", "alias", "rollback", "delete", "restore", "collect", "removed"):
            assert outcomes[change], change
        for change in OFTEN_INTERRUPTED:
            assert interrupted[change], change
        assert num_happened
        assert num_left_over


def check_catalog(catalog: SqlCatalog, journal: Journal, begun: dict | None, contents: dict[str, str]) -> bool:
    """The catalog has what the journal says. Takes over whether what had been begun has happened, and returns it."""
    happened = False
    for name, adapter in journal.adapters.items():
        found = view_of(catalog, name, contents)
        if found == adapter.view:  # if it is deleted, only what is done next tells whether it has been purged
            continue
        possible = [] if begun is None or begun.get("name") != name else adapter.after(begun)
        match = [after for after, _ in possible if after.view == found]
        assert match, f"{name} is {found}; after {adapter}, with {begun} under way, it must be {adapter.view}"
        journal.adapters[name], happened = match[0], True
    return happened


def view_of(catalog: SqlCatalog, name: str, contents: dict[str, str]) -> tuple[dict[int, str], dict[str, int]] | None:
    """As the model's."""
    try:
        details = catalog.show("default", name, limit=1000)
    except AdapterNotFound:
        return None
    for alias in details.aliases:
        moves = list(reversed(catalog.alias_history("default", name, alias, limit=1000)))
        assert moves[0].from_number is None
        assert all(first.to_number == second.from_number for first, second in itertools.pairwise(moves))
        assert moves[-1].to_number == details.aliases[alias]
        assert catalog.resolve(f"{name}@{alias}").number == details.aliases[alias]
    return {each.number: contents[each.revision_id] for each in details.revisions}, details.aliases
