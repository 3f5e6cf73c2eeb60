"""64 importers and 64 movers of aliases at once, in several processes of many threads."""

from __future__ import annotations

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from support.adapters.library_crowd import MOVED, NUM_IMPORTED, NUM_MOVED, NUM_TARGETS, Crowd, wait_for, work
from support.adapters.random_adapters import write_random_lora
from support.adapters.stored_objects import num_incoming
from support.adapters.tiny_model import write_model_config

from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import open_store

pytestmark = pytest.mark.slow

NUM_EACH, NUM_PROCESSES, NUM_CONTENTS = 64, 4, 10


def test_64_importers_and_64_movers(catalog, database, tmp_path):
    model = write_model_config(tmp_path / "model")
    base = BaseModel.read(model)
    sources = [
        write_random_lora(tmp_path / "sources" / str(seed), base, seed, modules=["q_proj"], rank=2)
        for seed in range(NUM_CONTENTS)
    ]
    ids = {source.name: revision_id_of(read_adapter(source, base, Limits())) for source in sources}
    store = open_store(f"file://{tmp_path}/store")
    library = AdapterLibrary(catalog, store, base, Limits(), "bfloat16")
    for source in sources[:NUM_TARGETS]:
        library.import_directory(MOVED, source)
    catalog.set_alias("default", MOVED, "prod", 1)
    share = NUM_EACH // NUM_PROCESSES
    crowds = [
        Crowd(database.url, store.url, model, sources, ["bot", "acme/bot", "helper"],
              range(first, first + share), range(first, first + share))
        for first in range(0, NUM_EACH, share)
    ]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NUM_PROCESSES)
    with ProcessPoolExecutor(NUM_PROCESSES, context, initializer=wait_for, initargs=(barrier,)) as pool:
        results = list(pool.map(work, crowds))

    # One copy of each content, whole, and nothing left over.
    imported = [each for one in results for each in one.imported]
    assert len(imported) == NUM_EACH * NUM_IMPORTED
    wanted = {ids[source] for _, source, _ in imported} | {ids[source.name] for source in sources[:NUM_TARGETS]}
    assert [each.revision_id for each in store.list()] == sorted(wanted) == list(catalog.referenced_revisions())
    assert library.fsck(0).is_sound
    assert num_incoming(store) == 0

    # Every importer of the same content got the same number, and the numbers have no gaps.
    numbers: dict[str, dict[str, int]] = {}
    for name, source, number in imported:
        assert numbers.setdefault(name, {}).setdefault(source, number) == number
    for name, given in numbers.items():
        assert sorted(given.values()) == list(range(1, len(given) + 1))
        for source, number in given.items():
            assert catalog.resolve(f"{name}@r{number}").revision_id == ids[source]

    # Every alias has one history, in which each move begins where the one before it ended.
    for tenant, name, alias in (
        ("default", MOVED, "prod"), ("default", "bot", "latest"), ("acme", "bot", "latest"),
        ("default", "helper", "latest"),
    ):  # fmt: skip
        moves = list(reversed(catalog.alias_history(tenant, name, alias, limit=10_000)))
        assert moves[0].from_number is None
        assert all(first.to_number == second.from_number for first, second in itertools.pairwise(moves))
        assert all(move.from_number != move.to_number for move in moves)
        assert all(first.sequence < second.sequence for first, second in itertools.pairwise(moves))
        assert catalog.show(tenant, name).aliases[alias] == moves[-1].to_number

    # The returned moves are that history: none was lost, and none is missing from it.
    moved = {move.sequence: move for one in results for move in one.moved}
    history = {move.sequence: move for move in catalog.alias_history("default", MOVED, "prod", limit=10_000)}
    first = min(history)
    assert {sequence: move for sequence, move in history.items() if sequence != first} == {
        sequence: move for sequence, move in moved.items() if sequence != first
    }
    num_conflicts = sum(one.num_conflicts for one in results)
    print(f"{len(history)} moves, {num_conflicts} of {NUM_EACH * NUM_MOVED // 2} came too late")
    assert num_conflicts
