import shutil
import traceback

import pytest

from adapters.catalog.static import StaticCatalog
from adapters.damaged_adapters import DAMAGES
from adapters.errors import (
    AdapterChanged,
    AdapterMalformed,
    AdapterMissing,
    AdapterNotFound,
    AdapterUnsupported,
    InvalidReference,
)
from adapters.formats import read_adapter
from adapters.manifest import revision_id_of
from adapters.random_adapters import write_random_lora, write_random_reft
from adapters.revision import read_revision


@pytest.fixture
def directories(base, tmp_path):
    dora = write_random_lora(tmp_path / "dora", base, seed=9)
    DAMAGES["DoRA"].apply(dora)
    return {
        "zebra": write_random_lora(tmp_path / "zebra", base, seed=1),
        "support-bot": write_random_lora(tmp_path / "support", base, seed=2),
        "acme/support-bot": write_random_lora(tmp_path / "acme", base, seed=3, rank=2),
        "reft": write_random_reft(tmp_path / "reft", base, 4),
        "dora": dora,
        "gone": tmp_path / "gone",
    }


@pytest.fixture
def catalog(directories, base, limits):
    return StaticCatalog.load(directories, base, limits)


def test_references_that_are_resolved(catalog, directories, base, limits):
    expected = revision_id_of(read_adapter(directories["support-bot"], base, limits))
    for reference in (
        "support-bot",
        "default/support-bot",
        "support-bot@latest",
        "support-bot@r1",
        f"support-bot@{expected}",
    ):
        revision = catalog.resolve(reference)
        assert (revision.tenant, revision.name, revision.revision_id) == ("default", "support-bot", expected)
    assert revision.full_name == "support-bot"
    assert revision.directory == directories["support-bot"]
    assert revision.bytes == (directories["support-bot"] / "adapter_model.safetensors").stat().st_size
    assert revision.manifest.max_rank == 8
    other = catalog.resolve("acme/support-bot")
    assert (other.full_name, other.manifest.max_rank) == ("acme/support-bot", 2)
    assert other.revision_id != expected
    assert catalog.resolve("reft").manifest.kinds == ("reft",)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("suport-bot", "did you mean 'support-bot'"),
        ("Zebra", "did you mean 'zebra'"),
        ("qqq", "no adapter 'qqq'$"),
        ("acme/zebra", "no adapter 'acme/zebra'$"),  # another tenant's names are not told
        ("nobody/support-bot", "no adapter 'nobody/support-bot'$"),
        ("zebra@prod", "no alias 'prod'; it has the alias 'latest' only"),
        ("zebra@r2", "no revision r2; it has r1 only"),
        ("zebra@sha256:" + "0" * 64, "it has sha256:"),
    ],
)
def test_references_that_are_not_found(catalog, reference, says):
    with pytest.raises(AdapterNotFound, match=says) as caught:
        catalog.resolve(reference)
    assert caught.value.http_status == 404


def test_bad_references(catalog):
    with pytest.raises(InvalidReference):
        catalog.resolve("a b")


def test_a_bad_adapter_does_not_disturb_the_others(catalog):
    for _ in range(2):
        with pytest.raises(AdapterUnsupported, match="DoRA"):
            catalog.resolve("dora")
        with pytest.raises(AdapterMissing, match="must exist"):
            catalog.resolve("gone@r1")
    assert catalog.resolve("zebra")


def test_every_raised_error_is_fresh(catalog):
    """A kept error would grow its traceback with each request and hold on to the requests' frames."""
    errors = []
    for _ in range(3):
        with pytest.raises(AdapterUnsupported) as caught:
            catalog.resolve("dora")
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1
    kept = next(entry.error for entry in catalog.list() if entry.name == "dora")
    assert kept.__traceback__ is None
    assert kept.__context__ is None
    assert kept.__cause__ is None


def test_the_list_is_in_order(catalog):
    entries = catalog.list()
    assert [entry.full_name for entry in entries] == [
        "dora",
        "gone",
        "reft",
        "support-bot",
        "zebra",
        "acme/support-bot",
    ]
    assert [entry.revision is None for entry in entries] == [True, True, False, False, False, False]
    assert [type(entry.error) for entry in entries[:3]] == [AdapterUnsupported, AdapterMissing, type(None)]


def test_names_are_checked(base, limits, tmp_path):
    with pytest.raises(ValueError, match="is not an adapter name"):
        StaticCatalog.load({"a b": tmp_path}, base, limits)
    with pytest.raises(ValueError, match="given twice"):
        StaticCatalog.load({"a": tmp_path, "default/a": tmp_path}, base, limits)


def test_an_empty_catalog_is_a_catalog(base, limits):
    catalog = StaticCatalog.load({}, base, limits)
    assert list(catalog.list()) == []
    with pytest.raises(AdapterNotFound):
        catalog.resolve("any")


def test_a_directory_whose_content_changed(catalog, directories, base, limits):
    revision = catalog.resolve("zebra")
    assert read_revision(revision.directory, revision.revision_id, base, limits).kinds == ("lora",)
    shutil.copy(directories["support-bot"] / "adapter_model.safetensors", revision.directory)
    with pytest.raises(AdapterChanged, match=revision.revision_id) as caught:
        read_revision(revision.directory, revision.revision_id, base, limits)
    assert caught.value.http_status == 409
    DAMAGES["cut short"].apply(revision.directory)
    with pytest.raises(AdapterMalformed):
        read_revision(revision.directory, revision.revision_id, base, limits)
