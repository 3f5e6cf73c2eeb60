"""A process that changes managed adapters until it is killed, and keeps a journal. For test_library_crash.

A worker changes only adapters of its own, but their contents are the same as the other workers', and a garbage
collection concerns all of them. Its journal has a line before each call and one, on the disk, after each call that
returned: the outcome, and what the worker sees of the adapter from then on.
"""

import itertools
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound, CatalogConflict, RevisionBeingRemoved
from adapters.files.work_folder import work_folder
from adapters.formats import Limits
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.store import open_store

NUM_NAMES = 4
ALIASES = ("latest", "prod")


# An adapter as a worker sees it: {"revisions": {number: revision id}, "aliases": {alias: number}}; None: there is none.
View = dict[str, dict[str, Any]] | None


def view_of(catalog: SqlCatalog, name: str) -> View:
    """Checks the moves of its aliases, too."""
    try:
        details = catalog.show("default", name, limit=1000)
    except AdapterNotFound:
        return None
    for alias, number in details.aliases.items():
        moves = list(reversed(catalog.alias_history("default", name, alias, limit=1000)))
        assert moves[0].from_number is None
        assert all(first.to_number == second.from_number for first, second in itertools.pairwise(moves))
        assert moves[-1].to_number == catalog.resolve(f"{name}@{alias}").number == number
    return {"revisions": {str(each.number): each.revision_id for each in details.revisions}, "aliases": details.aliases}


def names_of(worker: int) -> list[str]:
    """The adapters that a worker changes."""
    return [f"a{worker}-{number}" for number in range(NUM_NAMES)]


class Worker:
    """Makes random changes."""

    def __init__(self, library: AdapterLibrary, names: list[str], sources: list[Path], journal: Path):
        self._library, self._names, self._sources = library, names, sources
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._random = random.Random()  # seeded anew in each process

    def run(self) -> None:
        """Return only when the test has ended."""
        changes: list[tuple[Callable[[str], None], int]] = [
            (self._import, 8), (self._push, 4), (self._push_in_memory, 4), (self._alias, 4),
            (self._roll_back, 4), (self._delete, 6), (self._restore, 2), (self._collect, 3),
        ]  # fmt: skip
        kinds, weights = zip(*changes, strict=True)
        test = multiprocessing.parent_process()
        while test is not None and test.is_alive():
            (change,) = self._random.choices(kinds, weights)
            change(self._random.choice(self._names))

    def _import(self, name: str, moves_latest: bool = True) -> int | None:
        source = self._random.choice(self._sources)
        outcome = self._recorded(
            {"change": "import", "name": name, "content": source.name, "moves_latest": moves_latest},
            lambda: self._library.import_directory(name, source, moves_latest=moves_latest).number,
        )
        return outcome if isinstance(outcome, int) else None

    def _push(self, name: str) -> None:
        number = self._import(name, moves_latest=False)
        if number is not None:
            self._move(name, "latest", number)

    def _alias(self, name: str) -> None:
        try:
            revisions = self._library.catalog.show("default", name).revisions
        except AdapterNotFound:
            return
        self._move(name, self._random.choice(ALIASES), self._random.choice(revisions).number)

    def _push_in_memory(self, name: str) -> None:
        source = self._random.choice(self._sources)

        def push() -> int:
            with work_folder("import") as folder:
                packed = self._library.pack(name, source, folder / "packed")
                return self._library.add_in_memory(name, packed, "latest").number

        self._recorded({"change": "import", "name": name, "content": source.name, "moves_latest": True}, push)

    def _move(self, name: str, alias: str, number: int) -> None:
        self._recorded(
            {"change": "alias", "name": name, "alias": alias, "number": number},
            lambda: self._library.catalog.set_alias("default", name, alias, number).to_number,
        )

    def _roll_back(self, name: str) -> None:
        alias = self._random.choice(ALIASES)
        self._recorded(
            {"change": "rollback", "name": name, "alias": alias},
            lambda: self._library.catalog.rollback("default", name, alias).to_number,
        )

    def _delete(self, name: str) -> None:
        self._recorded({"change": "delete", "name": name}, lambda: self._library.catalog.delete("default", name))

    def _restore(self, name: str) -> None:
        self._recorded({"change": "restore", "name": name}, lambda: self._library.catalog.restore("default", name))

    def _collect(self, _name: str) -> None:
        self._recorded({"change": "collect"}, lambda: self._library.collect_garbage(datetime.now(UTC)))

    def _recorded(self, change: dict[str, Any], call: Callable[[], int | None]) -> int | str | None:
        """Make the call; return its result, or the name of the refusal. Any other error ends the worker."""
        self._write({"begin": change})
        outcome: int | str | None
        try:
            outcome = call()
        except (AdapterNotFound, CatalogConflict, RevisionBeingRemoved) as error:
            outcome = type(error).__name__
        view = view_of(self._library.catalog, change["name"]) if "name" in change else None
        self._write({"outcome": outcome, "view": view})
        os.fsync(self._journal)
        return outcome

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(line).encode() + b"\n")


def work(worker: int, settings: dict[str, Any]) -> None:
    """Return only when the test has ended."""
    # What a killed import leaves in the folder for temporary files is left to the system's clean-up.
    tempfile.tempdir = settings["scratch"]
    library = AdapterLibrary(
        SqlCatalog(settings["catalog"]),
        open_store(settings["store"], settings["s3"]),
        BaseModel.read(Path(settings["model"])),
        Limits(),
        "bfloat16",
    )
    sources = sorted(Path(settings["sources"]).iterdir())
    Worker(library, names_of(worker), sources, Path(settings["journals"]) / str(worker)).run()
