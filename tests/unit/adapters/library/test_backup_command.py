"""`prelude catalog backup` and `restore`: what they print, note and refuse."""

from contextlib import closing
from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora
from support.adapters.tiny_model import write_model_config
from support.commands import Prelude

from adapters.catalog.sql import SqlCatalog
from adapters.model.base_model import BaseModel


@pytest.fixture
def config(tmp_path: Path, prelude: Prelude) -> Path:
    """Of a cluster with an adapter."""
    write_model_config(tmp_path)
    write_random_lora(tmp_path / "lora", BaseModel.read(tmp_path), 1, modules=["q_proj"], rank=2)
    config = config_with(tmp_path, "cluster")
    prelude.prints("adapters", "import", "bot", tmp_path / "lora", "--config", config)
    return config


def config_with(folder: Path, name: str) -> Path:
    """A cluster.yaml with a catalog and a store of that name."""
    path = folder / f"{name}.yaml"
    path.write_text(
        f"model: {{path: {folder}, name: demo}}\nworkers: {{u: {{role: unified}}}}\n"
        f"catalog: {{url: 'sqlite:///{folder / name}.db'}}\nstore: {{url: 'file://{folder / name}-store'}}\n"
        f"integrity: {{key_directory: '{folder / name}-keys'}}\n"
    )
    return path


def newest_event(folder: Path, name: str) -> tuple[str, str | None, str | None]:
    with closing(SqlCatalog.open(f"sqlite:///{folder / name}.db")) as catalog:
        (event,) = catalog.audit.newest(1)
        return event.action, event.object, event.new


def test_there_and_back(config: Path, tmp_path: Path, prelude: Prelude) -> None:
    backup = tmp_path / "backup"
    found = prelude.json("catalog", "backup", backup, "--config", config)
    name = found.pop("catalog")
    assert found == {"num_revisions": 1, "num_copied": 1, "num_unsigned": 0, "lacking": []}
    output = prelude.prints("catalog", "backup", tmp_path / "rows", "--catalog-only", "--config", config)
    assert output.split(": ")[1] == "1 revisions, 0 copied\n"
    assert newest_event(tmp_path, "cluster") == ("catalog.backup", f"file://{tmp_path}/rows", output.split(": ")[0])
    assert not (tmp_path / "rows" / "revisions").exists()

    other = config_with(tmp_path, "other")
    for _ in range(2):  # a refusal is noted nowhere: its row would refuse the next attempt
        prelude.refuses("catalog", "restore", tmp_path / "rows", "--config", other, says=": adapter_store_corrupt: ")
    output = prelude.prints("catalog", "restore", backup, "--catalog", name, "--config", other)
    assert output.splitlines() == [
        f"{name}: 1 revisions, 1 restored",
        "1 lack this cluster's signature; if you trust them: `prelude adapters sign`",
    ]
    assert newest_event(tmp_path, "other") == ("catalog.restore", f"file://{backup}", name)
    prelude.prints("adapters", "export", "bot", tmp_path / "exported", "--config", other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("backup", "{folder}/cluster-store"), "is the store itself; name another folder"),
        (("backup", "ftp://host/folder"), "is neither file:///folder nor s3://bucket/prefix"),
        (
            ("restore", "{folder}/nowhere"),
            "nowhere does not exist; name the folder that `prelude catalog backup` wrote",
        ),
        (("restore", "{folder}"), "has no catalog "),
    ],
)
def test_wrong_usage(words: tuple[str, str], message: str, config: Path, tmp_path: Path, prelude: Prelude) -> None:
    command, place = words
    if command == "restore":
        config = config_with(tmp_path, "other")
    prelude.refuses("catalog", command, place.format(folder=tmp_path), "--config", config, says=message, status=2)
