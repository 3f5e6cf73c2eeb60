"""An adapter is applied where its files say that it was trained, or else everywhere; never silently to the prompt."""

import json

import pytest
from support.adapters.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)

from adapters.catalog.described import revision_as_json
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.manifest import Manifest, revision_id_of
from adapters.packed.packing_process import pack_in_process
from adapters.store import open_store

SILENT = {  # layouts whose files may say positions
    "peft": lambda folder, base: write_random_lora(folder, base, 1, rank=2, config={"prelude": {}}),
    "peft null": lambda folder, base: write_random_lora(folder, base, 1, config={"prelude": {"positions": None}}),
    "prelude ReFT": lambda folder, base: without_positions(write_random_reft(folder, base, 1)),
    "prelude mixed": lambda folder, base: without_positions(write_random_mixed(folder, base, 1)),
}
FOR_THE_PROMPT = {
    "peft": lambda folder, base: write_random_lora(folder, base, 1, config={"prelude": {"positions": "prefill"}}),
    "prelude ReFT": lambda folder, base: write_random_reft(folder, base, 1),
}
EVERYWHERE = {
    "peft": lambda folder, base: write_random_lora(folder, base, 1, config={"prelude": {"positions": "all"}}),
    "prelude ReFT": lambda folder, base: write_random_reft(folder, base, 1, positions="all"),
}
PAIRS_ONLY = Limits(serves_all_positions=False)


def without_positions(directory):
    path = directory / "prelude_adapter.json"
    config = json.loads(path.read_text())
    del config["positions"]
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("layout", SILENT)
def test_files_that_say_nothing(base, tmp_path, layout):
    directory = SILENT[layout](tmp_path / "a", base)
    adapter = read_adapter(directory, base, Limits())
    assert (adapter.positions, adapter.trained_positions) == ("all", None)
    assert "do not say for which positions" in " ".join(adapter.warnings)
    with pytest.raises(AdapterUnsupported, match=r"prelude adapters convert.*--positions prefill"):
        read_adapter(directory, base, PAIRS_ONLY)
    for limits in (Limits(), PAIRS_ONLY):
        forced = read_adapter(directory, base, limits, "prefill")
        assert (forced.positions, forced.trained_positions) == ("prefill", "all")
        assert "as was asked for" in " ".join(forced.warnings)
        assert "do not say" not in " ".join(forced.warnings)
    assert revision_id_of(forced) != revision_id_of(adapter)


def test_experts_of_a_mixture(moe_base, tmp_path):
    directory = write_random_expert_lora(tmp_path / "a", moe_base, 1, config={"prelude": None})
    assert read_adapter(directory, moe_base, Limits()).positions == "all"
    with pytest.raises(AdapterUnsupported, match="all positions"):
        read_adapter(directory, moe_base, PAIRS_ONLY)


@pytest.mark.parametrize("layout", FOR_THE_PROMPT)
@pytest.mark.parametrize("given", [None, "prefill"])
@pytest.mark.parametrize("limits", [Limits(), PAIRS_ONLY], ids=["unified", "pairs"])
def test_files_that_say_the_prompt(base, tmp_path, layout, given, limits):
    adapter = read_adapter(FOR_THE_PROMPT[layout](tmp_path / "a", base), base, limits, given)
    assert (adapter.positions, adapter.trained_positions) == ("prefill", None)
    assert "position" not in " ".join(adapter.warnings)


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_files_that_say_all(base, tmp_path, layout):
    directory = EVERYWHERE[layout](tmp_path / "a", base)
    adapter = read_adapter(directory, base, Limits())
    assert (adapter.positions, adapter.trained_positions, adapter.warnings) == ("all", None, ())
    with pytest.raises(AdapterUnsupported, match=r"^the adapter is applied at all positions"):
        read_adapter(directory, base, PAIRS_ONLY)
    forced = read_adapter(directory, base, PAIRS_ONLY, "prefill")
    assert (forced.positions, forced.trained_positions) == ("prefill", "all")


@pytest.mark.parametrize("key", ["positions", "trained_positions"])
@pytest.mark.parametrize("value", ["prompt", "", 1, ["all"]])
def test_positions_that_do_not_exist(base, tmp_path, key, value):
    directory = write_random_lora(tmp_path / "a", base, 1, config={"prelude": {"positions": "all", key: value}})
    with pytest.raises(AdapterMalformed, match=f"prelude: {key} is"):
        read_adapter(directory, base, Limits())


def test_what_it_was_trained_for_stays_with_it(base, tmp_path):
    """In the catalog's lists, in an export and in what is imported from that."""
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path}/catalog.db")
    store = open_store(f"file://{tmp_path}/store")
    library = AdapterLibrary(catalog, store, base, PAIRS_ONLY, "float32", packer=pack_in_process)
    directory = SILENT["peft"](tmp_path / "a", base)
    with pytest.raises(AdapterUnsupported, match="--positions prefill"):
        library.import_directory("bot", directory)
    revision = library.import_directory("bot", directory, positions="prefill")
    assert revision_as_json(revision, 0)["trained_positions"] == "all"
    library.export("bot", tmp_path / "exported")
    again = library.import_directory("again", tmp_path / "exported")
    assert (again.manifest.positions, again.manifest.trained_positions) == ("prefill", "all")
    library.import_directory("honest", FOR_THE_PROMPT["prelude ReFT"](tmp_path / "b", base))
    found = {each.name: (each.positions, each.trained_positions) for each in catalog.list()}
    assert found == {"bot": ("prefill", "all"), "again": ("prefill", "all"), "honest": ("prefill", None)}
    assert catalog.show("default", "bot", 5).revisions[0].trained_positions == "all"
    catalog.close()


def test_manifests_of_earlier_releases_are_read(base, tmp_path):
    text = Manifest.of(read_adapter(FOR_THE_PROMPT["peft"](tmp_path / "a", base), base, Limits())).to_json()
    assert "trained_positions" not in text  # or their revision ids would change
    assert Manifest.from_json(text).to_json() == text
