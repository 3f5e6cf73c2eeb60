"""`prelude adapters …` on a catalog and a store: effects, output and exit statuses."""

import os
import re
import shutil
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora
from support.adapters.tiny_model import write_model_config
from support.commands import Prelude

from adapters.catalog.sql import SqlCatalog
from adapters.files.work_folder import WorkFolder
from adapters.model.base_model import BaseModel
from adapters.packed import packing
from cluster.config.load import load_cluster_config
from cluster.open_library import open_library

pytestmark = pytest.mark.slow

CLUSTER = """\
model: {path: model, name: demo}
workers:
  u: {role: unified}
adapter_limits: {max_rank: 4}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a cluster.yaml and the directories lora-1 to lora-3."""
    write_model_config(tmp_path / "model")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    base = BaseModel.read(tmp_path / "model")
    for seed in (1, 2, 3):
        write_random_lora(tmp_path / f"lora-{seed}", base, seed, rank=2)
    write_random_lora(tmp_path / "too-large", base, 1, rank=8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prelude(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("adapters",))


@pytest.fixture
def ask(prelude: Prelude):
    return prelude.json


def test_an_import_ends_with_its_tenant(prelude, ask, monkeypatch):
    ask("import", "acme/bot", "lora-1")
    read = packing.read_adapter

    def read_while_the_tenant_is_deleted(*arguments):
        catalog = SqlCatalog("sqlite:///.prelude/catalog.db")
        catalog.tenants.remove("acme")
        catalog.close()
        return read(*arguments)

    monkeypatch.setattr(packing, "read_adapter", read_while_the_tenant_is_deleted)
    prelude.refuses("import", "acme/bot", "lora-2", says="the tenant 'acme' was deleted after this change began")
    assert ask("list", "--tenant", "acme") == []


def test_positions_are_never_assumed(prelude, ask, folder):
    """Of files that say nothing of them. `verify` says the same as `import`."""
    write_random_lora(folder / "mute", BaseModel.read(folder / "model"), 1, rank=2, config={"prelude": None})
    for command in (("import", "bot", "mute"), ("verify", "mute", "--config", "cluster.yaml", "--no-model")):
        assert "do not say for which positions" in prelude.prints(*command)
    assert ask("show", "bot")["latest"]["positions"] == "all"
    (folder / "cluster.yaml").write_text(
        CLUSTER.replace("u: {role: unified}", "p: {role: prefill}\n  d: {role: decode}")
    )
    for command in (("import", "new", "mute"), ("verify", "mute", "--config", "cluster.yaml", "--no-model")):
        prelude.refuses(*command, says="prelude adapters convert")
    assert "as was asked for" in prelude.prints("import", "new", "mute", "--positions", "prefill")
    for command in (("list",), ("show", "new")):
        assert "trained for all" in prelude(*command)[1]


def test_gc_counts_ages_by_the_clock_of_the_catalog(ask, monkeypatch):
    ask("import", "bot", "lora-1")
    ask("delete", "bot")
    monkeypatch.setattr(SqlCatalog, "now", lambda _: datetime.now(UTC) - timedelta(days=1))
    assert ask("gc", "--older-than", "0s") == {"num_removed": 0}
    monkeypatch.setattr(SqlCatalog, "now", lambda _: datetime.now(UTC) + timedelta(days=8))
    assert ask("gc") == {"num_removed": 1}


def test_a_revision_that_is_in_workers_memory_only(prelude, ask, folder):
    ask("import", "bot", "lora-1")
    library = open_library(load_cluster_config(folder / "cluster.yaml"))
    library.add_in_memory("bot", library.pack("bot", folder / "lora-2", folder / "packed"), "latest")
    library.catalog.close()
    assert [each["stored"] for each in ask("show", "bot")["revisions"]] == [False, True]
    assert ask("list")[0]["latest"]["stored"] is False
    assert prelude("list")[1].rstrip().endswith("…  in memory only")
    assert [line.endswith("  in memory only") for line in prelude("show", "bot")[1].splitlines()[-2:]] == [True, False]
    prelude.refuses("export", "bot", "out", says="bot@r2 is kept in workers' memory only")
    assert ask("fsck")["num_referenced"] == 1
    assert ask("import", "bot", "lora-2", "--keep-latest")["stored"] is True
    assert "in memory only" not in prelude("show", "bot")[1]
    assert prelude("export", "bot", "out")[0] == 0


def test_an_adapter_s_life(prelude, ask, folder):
    first = ask("import", "bot", "lora-1")
    assert (first["name"], first["number"], first["kinds"], first["positions"]) == ("bot", 1, ["lora"], "prefill")
    second = ask("import", "bot", "lora-2", "--tag", "prod")
    assert (second["number"], ask("import", "bot", "lora-1", "--keep-latest")["number"]) == (2, 1)
    shown = ask("show", "bot")
    assert shown["aliases"] == {"latest": 2, "prod": 2}
    assert [each["revision"] for each in shown["revisions"]] == [second["revision"], first["revision"]]

    moved = ask("alias", "bot@prod", "r1")
    assert datetime.fromisoformat(moved.pop("moved_at")).tzinfo
    assert moved.pop("moved_by").endswith("(command line)")
    expected = {"object": "adapter.alias", "name": "bot", "alias": "prod", "from_number": 2, "number": 1}
    assert moved == expected
    assert ask("alias", "bot@canary", first["revision"])["from_number"] is None
    assert ask("alias", "bot@canary", "latest")["number"] == 2
    assert ask("rollback", "bot@prod")["number"] == 2
    assert ask("rollback", "bot").items() >= {**expected, "alias": "latest"}.items()
    history = ask("history", "bot", "--alias", "prod")
    assert history["has_more"] is False
    assert [(each["from_number"], each["number"]) for each in history["data"]] == [(1, 2), (2, 1), (None, 2)]
    last_two = ask("history", "bot", "--alias", "prod", "--limit", "2")
    assert last_two == {**history, "data": history["data"][:2], "has_more": True}
    assert [each["number"] for each in ask("history", "bot")["data"]] == [1, 2, 1]  # of `latest`

    ask("import", "acme/bot", "lora-1")
    assert [each["name"] for each in ask("list")] == ["acme/bot", "bot"]
    assert [each["name"] for each in ask("list", "--tenant", "acme")] == ["acme/bot"]
    assert ask("list", "--prefix", "c") == []
    ask("delete", "bot")
    assert [each["name"] for each in ask("list")] == ["acme/bot"]
    (deleted,) = ask("list", "--deleted")
    assert deleted["name"] == "bot"
    assert deleted["deleted_at"]
    assert ask("gc") == {"num_removed": 0}  # a week has not passed
    ask("restore", "bot")
    assert ask("show", "bot")["aliases"] == {"canary": 2, "latest": 1, "prod": 2}

    ask("delete", "bot")
    time.sleep(0.01)
    assert ask("gc", "--older-than", "0s") == {"num_removed": 1}  # the other one is acme's too
    prelude.refuses("restore", "bot", says="import it again")
    assert ask("fsck")["is_sound"]


def test_an_alias_is_split(prelude, ask):
    for directory in ("lora-1", "lora-2"):
        ask("import", "bot", directory, "--tag", "prod")
    move = ask("alias", "bot@prod", "r1=95", "latest=5")
    assert (move["number"], move["weights"], "from_weights" in move) == (1, {"r1": 95, "r2": 5}, False)
    assert ask("show", "bot")["splits"] == {"prod": {"r1": 95, "r2": 5}}
    assert "\n  prod                 r1 95%, r2 5%\n" in prelude("show", "bot")[1]
    _, out, _ = prelude("alias", "bot@prod", "r2=20", "r1=80")
    assert out == "bot@prod -> r1 80%, r2 20%  (was r1 95%, r2 5%)\n"
    assert prelude("alias", "bot@prod", "r2")[1] == "bot@prod -> r2  (was r1 80%, r2 20%)\n"
    assert prelude("rollback", "bot@prod")[1] == "bot@prod -> r1 80%, r2 20%  (was r2)\n"
    assert " r2 -> r1 80%, r2 20%  by " in prelude("history", "bot", "--alias", "prod")[1]
    catalog = SqlCatalog("sqlite:///.prelude/catalog.db")
    (event,) = [each for each in catalog.audit.newest(10) if each.action == "adapter.rollback"]
    catalog.close()
    assert (event.old, event.new) == ("r2", "r1 80%, r2 20%")
    for command in (("export", "bot@prod", "out"), ("alias", "bot@beta", "prod")):
        prelude.refuses(*command, says="'bot@prod' is split (r1 80%, r2 20%): name bot@r1 or bot@r2", status=2)


def test_an_export_is_imported_as_it_was(ask, folder):
    imported = ask("import", "bot", "lora-1")
    exported = ask("export", "bot@r1", "out")
    assert (exported["revision"], exported["dtype"]) == (imported["revision"], "bfloat16")
    again = ask("import", "other", "out")  # bfloat16 now, with its scale in it: other content
    assert ask("export", "other", "out-2")["revision"] == again["revision"] != imported["revision"]
    assert ask("import", "other", "out-2")["number"] == 1  # nothing more is lost


def test_what_people_read(prelude):
    assert prelude("list") == (0, "", "")
    _, out, errors = prelude("import", "acme/bot", "lora-1", "--tag", "prod")
    assert out.startswith("acme/bot@r1, prod  sha256:")
    assert errors == ""
    prelude("import", "bot", "lora-2")
    _, out, _ = prelude("list")
    assert [line.split()[:2] for line in out.splitlines()] == [["acme/bot", "r1"], ["bot", "r1"]]
    _, out, _ = prelude("show", "acme/bot")
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["acme/bot", "Aliases", "latest", "prod", "Revisions", "r1"]
    assert prelude("alias", "bot@prod", "r1")[1] == "bot@prod -> r1  (new)\n"
    _, out, _ = prelude("history", "bot", "--alias", "prod")
    head, move = out.splitlines()
    assert head == "bot@prod"
    assert re.fullmatch(r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC     new -> r1      by .+ \(command line\)", move)
    prelude("import", "bot", "lora-1", "--tag", "prod")
    _, out, _ = prelude("history", "bot", "--alias", "prod", "--limit", "1")
    assert [" r1 -> r2 " in line for line in out.splitlines()] == [False, True, False]
    assert "earlier" in out.splitlines()[-1]
    assert "restore bot" in prelude("delete", "bot")[1]
    assert "deleted" in prelude("list", "--deleted")[1]
    assert prelude("restore", "bot")[1] == "bot is back\n"
    assert "in bfloat16" in prelude("export", "bot", "out")[1]
    assert prelude("gc")[1] == "0 revisions removed\n"
    assert "is sound: 2 revisions" in prelude("fsck")[1]


def test_what_a_killed_import_left_is_removed(ask, folder, monkeypatch):
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    left = WorkFolder("import")
    os.close(left._descriptor)  # its lock goes with its process
    ask("import", "bot", "lora-1")
    assert list((folder / "tmp").iterdir()) == []


WRONG = (
    ("import a/b/c lora-1", 2, "invalid_adapter_reference", "is not an adapter name"),
    ("import default/demo lora-1", 2, "invalid_adapter_reference", "is the base model's name"),
    ("import bot lora-1 --tag r1", 2, "invalid_adapter_reference", "name an alias"),
    ("import bot nowhere", 1, "adapter_missing", "nowhere"),
    ("import bot too-large", 1, "adapter_incompatible", "rank 8"),
    ("import bot lora-1 --config nowhere.yaml", 2, "wrong_usage", "nowhere.yaml"),
    ("show bto", 1, "adapter_not_found", "no adapter 'bto'"),
    ("alias bot r1", 2, "invalid_adapter_reference", "write NAME@ALIAS"),
    ("alias bot@r1 r1", 2, "invalid_adapter_reference", "does not move"),
    ("alias bot@prod r9", 1, "adapter_not_found", "its newest is r1"),
    ("alias bot@prod r1=100", 2, "invalid_adapter_reference", "'r1=100' has no whole percent from 1 to 99"),
    ("alias bot@prod r1=50 r1", 2, "invalid_adapter_reference", "'r1' has no whole percent"),
    ("alias bot@prod r1=50 r1=50", 2, "invalid_adapter_reference", "found r1 50, r1 50); name one"),
    ("alias bot@prod r1=50 r9=50", 1, "adapter_not_found", "its newest is r1"),
    ("rollback bot", 1, "catalog_conflict", "no revision before r1"),
    ("history bot --alias prod", 1, "adapter_not_found", "no alias 'prod'"),
    ("history bot --alias r1", 2, "invalid_adapter_reference", "name an alias"),
    ("delete bot@prod", 2, "invalid_adapter_reference", "is not an adapter name"),
    ("restore other", 1, "adapter_not_found", "no adapter 'other'"),
    ("export bot lora-1", 2, "wrong_usage", "lora-1 exists"),
)


def test_what_goes_wrong(prelude, ask):
    ask("import", "bot", "lora-1")
    for words, status, code, said in WRONG:
        found, out, errors = prelude(*words.split())
        assert (found, out) == (status, ""), words
        assert f"prelude: {code}: " in errors
        assert said in errors
        error = ask(*words.split(), status=status)["error"]
        assert error["code"] == code
        assert said in error["message"]


def test_limits_and_ages_that_are_none(prelude):
    for limit in ("0", "x", "1001", "-1"):
        said = f"must be an integer from 1 to 1000 (found '{limit}')"
        prelude.refuses("history", "bot", f"--limit={limit}", says=said, status=2)
    for age in ("7", "d", "-1d", "1.5h", "7 d"):
        prelude.refuses("gc", f"--older-than={age}", says="such as 12h", status=2)
    over = "'999999999d' is over a hundred years"
    prelude.refuses("gc", "--older-than=999999999d", says=over, status=2)  # before the first year


def test_a_restore_says_what_the_backup_lacks(prelude, folder):
    prelude("import", "bot", "lora-1")
    catalog = replace(prelude, begin=("catalog",))
    catalog.prints("backup", "kept")
    (lost,) = (path for path in (folder / "kept" / "revisions").rglob("*") if path.is_file())
    lost.unlink()
    shutil.rmtree(folder / ".prelude")
    told = catalog.prints("restore", "kept", "--allow-missing")
    assert "1 are missing or damaged; `prelude adapters fsck` lists them" in told
    assert prelude("fsck")[0] == 1


def test_a_database_that_is_not_there(prelude, folder):
    with (folder / "cluster.yaml").open("a") as file:
        file.write("catalog: {url: 'postgresql://nobody@127.0.0.1:1/none'}\n")
    prelude.refuses("list", says="catalog_unavailable")
    (folder / "cluster.yaml").write_text(CLUSTER + f"catalog: {{url: 'sqlite:///{folder}/cluster.yaml/catalog.db'}}\n")
    prelude.refuses("list", says="cannot be made")
    (folder / "cluster.yaml").write_text(CLUSTER + "catalog: {url: 'mysql://x/y'}\n")
    prelude.refuses("list", says="catalog.url", status=2)
    (folder / "cluster.yaml").write_text(CLUSTER + "store: {url: 'ftp://x/y'}\n")
    prelude.refuses("fsck", says="neither file:///folder nor s3://", status=2)


def test_fsck_finds_and_repairs(prelude, ask, folder):
    damaged, lost, _ = (ask("import", "bot", f"lora-{seed}")["revision"] for seed in (1, 2, 3))

    def path(revision_id: str) -> Path:
        digits = revision_id.removeprefix("sha256:")
        return folder / ".prelude" / "store" / "revisions" / digits[:2] / digits

    content = bytearray(path(damaged).read_bytes())
    content[-65] ^= 1  # the last byte before the signature
    path(damaged).write_bytes(content)
    path(lost).unlink()
    (folder / ".prelude" / "store" / "incoming" / "left").write_bytes(b"half")

    found = ask("fsck", "--no-content", "--min-age", "0s", status=1)
    assert (found["missing"]["listed"], found["corrupt"]["count"]) == ([lost], 0)
    found = ask("fsck", status=1)
    assert (found["is_sound"], found["corrupt"]["listed"]) == (False, [damaged])
    assert found["left_over"]["count"] == 0  # it is young
    out = prelude.prints("fsck", "--repair", "--min-age", "0s", status=1)
    for said in ("is NOT sound", "1  are damaged", damaged, "were left by imports", "2  repaired"):
        assert said in out
    assert list((folder / ".prelude" / "store" / "quarantine").iterdir())
    for seed in (1, 2):
        ask("import", "bot", f"lora-{seed}")
    assert len(prelude.prints("fsck", "--min-age", "0s").splitlines()) == 2


def test_sign(ask, folder):
    """After the keys were lost: what the old ones signed is signed by the new ones."""
    ask("import", "legal", str(folder / "lora-1"))
    shutil.rmtree(folder / ".prelude" / "signing")
    ask("fsck")  # makes new keys, as the next router does
    assert ask("sign") == {"num_signed": 1, "damaged": []}
    assert ask("sign")["num_signed"] == 0
