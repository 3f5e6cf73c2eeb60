"""Write the files beside this one, in a checkout of 0.1.0 (commit 8f84249), with its environment:

    PYTHONPATH=. .venv/bin/python /path/to/generate.py FOLDER

`FOLDER` must not exist. It gets a catalog in SQLite, a store in a folder, the base model's config.json, one adapter's
files, and answers.json: what that release answered about all of it.
"""
# ruff: noqa: I001 - modules that are elsewhere today

from __future__ import annotations

import json
import sqlite3
import sys
from datetime import UTC, datetime
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.catalog.described import adapter_as_json, details_as_json, move_as_json, revision_as_json
from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.manifest import revision_id_of
from adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from adapters.store import open_store
from adapters.work_folder import work_folder

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 150,
}


def fill(library: AdapterLibrary, sources: Path) -> None:
    """Two tenants, every kind of change, and every state that an adapter or a revision can be in."""
    base, catalog = library.base, library.catalog

    def lora(seed: int) -> Path:
        name = {"base_model_name_or_path": "tiny"}
        return write_random_lora(sources / f"lora-{seed}", base, seed, modules=["q_proj"], rank=2, config=name)

    for seed in (1, 2, 3):
        library.import_directory("support", lora(seed), by="ann")
        catalog.set_alias("default", "support", "prod", seed, by="ann")
    catalog.rollback("default", "support", "prod", by="bob")
    catalog.rollback("default", "support", by="bob")
    catalog.set_alias("default", "support", "latest", 3, expected=2, by="ann")

    library.import_directory("acme/support", lora(1))  # the same content as the other tenant's
    reft = write_random_reft(sources / "reft", base, 4, kind="direft", rank=2, positions="all")
    library.import_directory("acme/support", reft, by="eve", moves_latest=False)
    library.import_directory("acme/mixed", write_random_mixed(sources / "mixed", base, 5, rank=2))

    library.import_directory("acme/live", lora(6))
    with work_folder("import") as folder:
        packed = library.pack("acme/live", lora(7), folder / "packed")
        library.add_in_memory("acme/live", packed, "train", by="trainer")

    library.import_directory("back", lora(8))
    catalog.delete("default", "back")
    catalog.restore("default", "back")

    library.import_directory("purged", lora(9))
    catalog.delete("default", "purged")
    assert library.collect_garbage(datetime.now(UTC)) == 1

    library.import_directory("gone", lora(10))
    catalog.delete("default", "gone")


def answers_of(library: AdapterLibrary, work: Path) -> dict[str, object]:
    """What the library answers about everything in it."""
    catalog = library.catalog
    listed = catalog.list()
    details = [catalog.show(each.tenant, each.name) for each in listed]
    histories = [
        [
            move_as_json(each.summary.full_name, move)
            for move in catalog.alias_history(each.summary.tenant, each.summary.name, alias)
        ]
        for each in details
        for alias in each.aliases
    ]
    references = [f"{each.summary.full_name}@{r}" for each in details for r in each.aliases] + [
        f"{each.summary.full_name}@r{revision.number}" for each in details for revision in each.revisions
    ]
    resolved = {reference: catalog.resolve(reference) for reference in references}
    exported = {}  # reference -> revision id of the exported files, which have the serving precision
    for number, (reference, revision) in enumerate(resolved.items()):
        if revision.stored:
            library.export(reference, work / str(number))
            exported[reference] = revision_id_of(read_adapter(work / str(number), library.base, library.limits))
    return {
        "listed": [adapter_as_json(each) for each in listed],
        "deleted": [adapter_as_json(each) for each in catalog.list(deleted=True)],
        "details": [details_as_json(each) for each in details],
        "histories": histories,
        "resolved": {reference: revision_as_json(revision) for reference, revision in resolved.items()},
        "manifests": {revision.revision_id: revision.manifest.to_json() for revision in resolved.values()},
        "exported": exported,
        "referenced": list(catalog.referenced_revisions()),
        "changes": [[each.sequence, each.kind, each.tenant, each.name] for each in catalog.changes_since(0)],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    catalog = SqlCatalog.open(f"sqlite:///{folder}/catalog.db")
    store, base = open_store(f"file://{folder}/store"), BaseModel.read(folder / "model")
    library = AdapterLibrary(catalog, store, base, Limits(), "bfloat16", "base")
    with work_folder("import") as sources:
        fill(library, sources)
        (sources / "lora-2").rename(folder / "lora-2")
    assert library.fsck(0).is_sound
    with work_folder("export") as work:
        answers = answers_of(library, work)
    (folder / "answers.json").write_text(json.dumps(answers, default=datetime.isoformat, indent=1))
    catalog.close()
    connection = sqlite3.connect(folder / "catalog.db")
    connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


if __name__ == "__main__":
    main()
