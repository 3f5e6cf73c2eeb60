"""The audit log: every change and every denial, with who and what, and never a key or a prompt."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.adapters.catalog_databases import CatalogDatabase
from support.adapters.random_adapters import write_random_lora
from support.router_stand_ins import BASE, eventually, running_cluster
from support.routers.keyed_cluster import KeyedCluster
from support.routers.management_calls import form, lora

from adapters.catalog.records import AuditEvent
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound, CatalogUnavailable
from adapters.scopes import Scope
from router.errors import Forbidden
from router.identity import audit as audit_module
from router.identity.access import ANYBODY, Principal
from router.identity.audit import AuditLog

SCOPE = {"method": "GET", "path": "/metrics", "request_id": "r1", "client": ("10.0.0.7", 1)}


async def events_of(catalog: SqlCatalog, count: int) -> Sequence[AuditEvent]:
    async def newest() -> Sequence[AuditEvent]:
        return catalog.audit.newest(100)

    return await eventually(newest, lambda found: len(found) >= count)


class Written:
    """An audit log, and what has become of its events."""

    def __init__(self, *, refuses: str = "") -> None:
        self.events: list[AuditEvent] = []
        self.num_lost = 0
        self.is_down = False
        self._refuses = refuses  # events of this request
        self.log = AuditLog(self._append, self._lose)

    async def _append(self, events: Sequence[AuditEvent]) -> None:
        if self.is_down:
            raise CatalogUnavailable("down")
        if any(each.request_id == self._refuses for each in events):
            raise RuntimeError("unforeseen")
        self.events.extend(events)

    def _lose(self, count: int) -> None:
        self.num_lost += count

    @property
    def request_ids(self) -> list[str | None]:
        return [each.request_id for each in self.events]

    @property
    def num_suppressed(self) -> int:
        return sum(int(str(each.object).partition(" ")[0]) for each in self.events if each.action == "denials")


async def test_changes_and_denials_over_http(keyed: KeyedCluster, tmp_path: Path):
    acme = await keyed.key("acme", {Scope.ADAPTERS_WRITE, Scope.ADAPTERS_READ})
    beta = await keyed.key("beta")
    secrets = [acme, beta, "Bearer", "tell nobody"]
    status, answer = await keyed.ask(acme, "POST", "/v1/adapters", data=form(lora(tmp_path, 5), name="acme/bot"))
    assert status == 201, answer
    new = f"r2 {answer['revision']}"
    await keyed.ask(acme, "POST", "/v1/adapters/acme/bot/rollback")
    _, history = await keyed.ask(acme, "GET", "/v1/adapters/acme/bot/aliases/latest")
    assert history["data"][0]["moved_by"].startswith("acme key ")
    await keyed.ask(acme, "PUT", "/v1/adapters/acme/bot/aliases/prod", json={"revision": "r9"})
    await keyed.ask(acme, "DELETE", "/v1/adapters/beta/bot")
    await keyed.complete(acme, prompt="tell nobody")  # lacks the scope
    await keyed.complete(beta, adapter="acme/bot", prompt="tell nobody")
    await keyed.ask(beta, "GET", "/v1/adapters/acme/bot")
    await keyed.ask("prelude_abcdefghijkm_" + "x" * 43, "GET", "/v1/models")
    await keyed.ask(beta, "GET", "/v1/models")  # no change, no denial
    events = await events_of(keyed.catalog, 8)
    old = events[0].old
    assert old.startswith("r1 sha256:")
    assert [(e.tenant, e.action, e.object, e.old, e.new, e.outcome) for e in events] == [
        ("acme", "adapter.import", "acme/bot@latest", old, new, "done"),
        ("acme", "adapter.rollback", "acme/bot@latest", "r2", "r1", "done"),
        ("acme", "adapter.alias", "acme/bot", None, None, "adapter_not_found"),
        ("acme", "adapter.delete", "beta/bot", None, None, "denied"),
        ("acme", "POST /v1/completions", None, None, None, "denied"),
        ("beta", "POST /v1/completions", "acme/bot", None, None, "denied"),
        ("beta", "GET /v1/adapters/acme/bot", "acme/bot", None, None, "denied"),
        (None, "GET /v1/models", None, None, None, "denied"),
    ]
    assert [each.who.partition(" ")[0] for each in events] == ["acme"] * 5 + ["beta"] * 2 + ["unknown"]
    assert all(each.request_id for each in events)
    assert not any(secret in str(events) for secret in secrets)


def test_imports_of_the_configuration(tmp_path: Path):
    bot = write_random_lora(tmp_path / "lora", BASE, seed=1)

    async def events(count: int) -> list[tuple[str, ...]]:
        url = f"sqlite:///{tmp_path / 'catalog.db'}"
        config = {"acme/bot": tmp_path / "none", "bot": bot}
        async with running_cluster(1, 1, folder=tmp_path, catalog_url=url, directories=config):
            catalog = SqlCatalog.open(url)
            found = await events_of(catalog, count)
            catalog.close()
        return sorted((each.who, each.action, str(each.object), str(each.new)[:9], each.outcome) for each in found)

    imported = ("cluster.yaml", "adapter.import", "bot@latest", "r1 sha256", "done")
    failed = ("cluster.yaml", "adapter.import", "acme/bot", "None", "adapter_missing")
    assert asyncio.run(events(2)) == [failed, imported]
    assert asyncio.run(events(3)) == [failed, failed, imported]  # the second start finds nothing new


def test_both_databases_append(database: CatalogDatabase):
    catalog = SqlCatalog.open(database.url)
    first = AuditEvent(catalog.now(), "me", "acme", "x", "o" * 9000, None, None, "done", "r1")
    second = AuditEvent(catalog.now(), "you", None, "y", None, "r1", "r2", "denied", None)
    catalog.audit.append([first, second])
    found = catalog.audit.newest(10)
    assert (found[0].who, len(found[0].object or ""), found[1]) == ("me", 500, second)
    assert catalog.audit.newest(10, "acme") == found[:1]
    assert catalog.audit.newest(1) == [second]
    assert catalog.last_change() == 0  # routers have nothing to read
    catalog.close()


def test_what_is_not_printable_is_escaped(database: CatalogDatabase):
    catalog = SqlCatalog.open(database.url)
    texts = ["a\x00b", "a\ud800b", "a\nb", "a\x1b[2Jb", "a\u202eb", "déjà vu"]
    escaped = ["a\\x00b", "a\\ud800b", "a\\nb", "a\\x1b[2Jb", "a\\u202eb", "déjà vu"]
    for text in texts:
        catalog.audit.append([AuditEvent(catalog.now(), text, text, text, text, text, text, text, text)])
    assert [(each.who, each.action, each.object, each.request_id) for each in catalog.audit.newest(10)] == [
        (text,) * 4 for text in escaped
    ]
    catalog.close()


async def test_an_event_that_cannot_be_written_is_lost_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audit_module, "_RETRY_S", 0.01)

    written = Written(refuses="3")
    change = written.log.changed
    async with written.log.running():
        async with asyncio.timeout(audit_module._CHANGE_TIMEOUT_S):
            changes = (change({**SCOPE, "request_id": str(each)}, ANYBODY, "x", None) for each in range(6))
            await asyncio.gather(*changes)
        await change({**SCOPE, "request_id": "6"}, ANYBODY, "x", None)
        assert written.request_ids == ["0", "1", "2", "4", "5", "6"]
    assert written.num_lost == 1
    assert "audit events cannot be written" in caplog.text


async def test_events_wait_for_a_catalog_that_is_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audit_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(audit_module, "_CHANGE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(audit_module, "_MAX_WAITING", 3)

    written = Written()
    written.is_down = True
    async with written.log.running():
        for number in range(5):  # answers are not held up for long
            await written.log.changed({**SCOPE, "request_id": str(number)}, ANYBODY, "adapter.pin", None)
        written.is_down = False
    assert (written.request_ids, written.num_lost) == (["2", "3", "4"], 2)
    assert "audit log not written" in caplog.text


async def test_a_flood_of_denials_is_counted():
    acme = Principal("acme", "acme key", frozenset())
    written = Written()
    async with written.log.running():
        for _ in range(5000):
            written.log.denied(dict(SCOPE), None, Forbidden("no"))
            written.log.denied(dict(SCOPE), None, ValueError("no denial"))
        written.log.denied(dict(SCOPE), acme, Forbidden("no"))  # which strangers cannot hide
        await written.log.changed(dict(SCOPE), ANYBODY, "adapter.pin", None)
    assert len(written.events) < 250  # 100 in each of two minutes, and few of what is counted
    told = [each.tenant for each in written.events if each.action != "denials"]
    assert told[-2:] == ["acme", "default"]
    assert written.num_suppressed + len(told) == 5002
    assert written.events[0].who == "unknown at 10.0.0.7"


async def test_a_flood_of_refused_changes_of_one_tenant_is_counted():
    acme, beta = (Principal(tenant, f"{tenant} key", frozenset()) for tenant in ("acme", "beta"))
    written = Written()
    log = written.log
    async with log.running():
        changes = [log.changed(dict(SCOPE), acme, "adapter.delete", AdapterNotFound("no")) for _ in range(2000)]
        changes += [log.changed(dict(SCOPE), acme, "adapter.delete", None) for _ in range(150)]
        changes += [log.changed(dict(SCOPE), beta, "adapter.delete", AdapterNotFound("no")) for _ in range(50)]
        await asyncio.gather(*changes)
    found = Counter((each.tenant, each.outcome) for each in written.events if each.action != "denials")
    assert found["acme", "adapter_not_found"] in (100, 200)  # 200 if a minute begins meanwhile
    assert (found["acme", "done"], found["beta", "adapter_not_found"]) == (150, 50)
    assert written.num_suppressed + found.total() == 2200
