"""Adapters as a router knows them: resolved from memory, from the catalog, and while that is away."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.adapters.catalog_databases import CatalogDatabase, add
from support.adapters.random_adapters import write_random_lora
from support.router_stand_ins import (
    BASE,
    DIRECTORIES,
    REVISION_ID,
    TEMPLATE,
    configured,
    eventually,
    library_over,
    managed_adapters,
    running_cluster,
    until,
)

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.rights import Right
from adapters.errors import AdapterError, AdapterNotFound, CatalogTooNew, RightWithdrawn
from adapters.library import AdapterLibrary
from adapters.packed import packing
from adapters.packed.packing import pack_directory
from adapters.store.errors import StoreUnavailable
from router.api import status_pages
from router.errors import ConflictingAdapters, InvalidField
from router.identity.access import ANYBODY
from router.metrics import Metrics
from router.revisions import adapter_service as managed_adapters_module
from router.revisions import configured_adapters
from router.revisions.adapter_service import AdapterService, reference_in
from router.revisions.configured_adapters import import_if_new


def lora(folder: Path, seed: int) -> Path:
    return write_random_lora(folder / f"lora-{seed}", BASE, seed=seed)


def count_of(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("prelude_router_resolutions_total", {"outcome": outcome}) or 0.0


@asynccontextmanager
async def following(adapters: AdapterService):
    adapters.open()
    async with adapters.following():
        yield adapters


async def code_of(resolving: Awaitable[Any]) -> str:
    try:
        await resolving
    except AdapterError as error:
        return error.code
    return "found"


@pytest.mark.parametrize(
    ("model", "adapter", "reference"),
    [
        ("base", None, None), ("base", "t/a0@prod", "t/a0@prod"), ("base:a0", "a0", "a0"),
        ("base:t/a0@sha256:ab", None, "t/a0@sha256:ab"), ("a0", "a0", "a0"), ("baseline", None, "baseline"),
    ],
)  # fmt: skip
def test_ways_to_name_an_adapter(model: str, adapter: str | None, reference: str | None) -> None:
    assert reference_in(model, adapter, "base") == reference


@pytest.mark.parametrize(
    ("model", "adapter", "error"),
    [("base:a0", "a1", ConflictingAdapters), ("a0", "a0@latest", ConflictingAdapters), ("base:", None, InvalidField)],
)
def test_names_that_are_refused(model: str, adapter: str | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        reference_in(model, adapter, "base")


class TestNames:
    async def test_from_the_database_then_from_memory(self, tmp_path: Path) -> None:
        metrics = Metrics()
        async with following(managed_adapters(tmp_path, metrics, **DIRECTORIES)) as adapters:
            await adapters.refresh()  # a change that comes in meanwhile keeps an answer out of the memory
            for reference in ("a0", "a0@latest", "a0@r1", f"a0@{REVISION_ID}", "default/a0"):
                assert (await adapters.resolve(reference)).revision_id == REVISION_ID
            assert (count_of(metrics, "database"), count_of(metrics, "memory")) == (5, 0)
            for _ in range(3):
                await adapters.resolve("a0")
            assert (count_of(metrics, "database"), count_of(metrics, "memory")) == (5, 3)
            assert await code_of(adapters.resolve("a9")) == "adapter_not_found"
            assert await code_of(adapters.resolve("a b")) == "invalid_adapter_reference"
            assert await code_of(adapters.resolve("broken")) == "adapter_malformed"
            assert (count_of(metrics, "not_found"), count_of(metrics, "invalid")) == (1, 2)

    async def test_many_who_wait_ask_once(self, tmp_path: Path) -> None:
        """One query for one name, and few threads for however many names: others get a 503."""
        asked: list[str] = []
        go_on = threading.Event()
        adapters = managed_adapters(tmp_path, **DIRECTORIES)
        adapters._resolve_timeout_s = 120  # the machine may stall
        async with following(adapters):
            resolver = adapters._resolver
            resolve = resolver.resolve

            def slow(reference: str) -> Any:
                asked.append(reference)
                go_on.wait(120)
                return resolve(reference)

            resolver.resolve = slow  # type: ignore[method-assign]
            same = [asyncio.create_task(adapters.resolve("a0")) for _ in range(50)]
            others = [asyncio.create_task(code_of(adapters.resolve(f"x{number}"))) for number in range(1200)]
            await asyncio.sleep(0.3)
            assert asked.count("a0") == 1
            assert len(asked) <= 8
            go_on.set()
            assert {(await each).revision_id for each in same} == {REVISION_ID}
            codes = [await each for each in others]
            assert codes.count("catalog_unavailable") == 201  # over the 1,000 that may wait, of which a0 is one
            assert codes.count("adapter_not_found") == 999

    async def test_after_a_change_nobody_joins_a_lookup_from_before(self, tmp_path: Path) -> None:
        """A lookup has read the old row and is slow; the alias moves; who asks then gets the new one."""
        adapters = managed_adapters(tmp_path, **DIRECTORIES)
        async with following(adapters):
            was_read, go_on = threading.Event(), threading.Event()
            found = await adapters.resolve("a0")
            answers = iter([("old", True), ("new", False)])

            def resolve(_: str) -> Any:
                name, is_slow = next(answers)
                if is_slow:
                    was_read.set()
                    go_on.wait(60)
                return name

            adapters._resolver.lookup = lambda _: None  # type: ignore[method-assign]
            adapters._resolver.resolve = resolve  # type: ignore[method-assign, assignment]
            before = asyncio.create_task(adapters.resolve("a0"))
            await asyncio.to_thread(was_read.wait, 30)
            await adapters.refresh()
            try:
                assert await asyncio.wait_for(adapters.resolve("a0"), 120) == "new"
            finally:
                go_on.set()
            assert await before == "old"
            assert not adapters._lookups
            assert not adapters._running_lookups
            assert found.revision_id == REVISION_ID

    async def test_a_slow_catalog_has_a_deadline(self, tmp_path: Path) -> None:
        adapters = managed_adapters(tmp_path, **DIRECTORIES)
        adapters._resolve_timeout_s = 0.2
        async with following(adapters):
            answers = threading.Event()
            adapters._resolver.resolve = lambda _: answers.wait(60)  # type: ignore[assignment, method-assign, return-value]
            try:
                assert await asyncio.wait_for(code_of(adapters.resolve("a0")), 120) == "catalog_unavailable"
            finally:
                answers.set()


class TestOutages:
    async def test_a_router_starts_without_its_database(self, database: CatalogDatabase, tmp_path: Path) -> None:
        catalog = SqlCatalog.open(database.url)  # makes the tables
        adapters = managed_adapters(tmp_path / "router", catalog_url=database.url, **DIRECTORIES)
        async with AsyncExitStack() as stack:
            with database.down(catalog):
                assert not adapters.open()
                async with asyncio.timeout(120):
                    await stack.enter_async_context(adapters.following())
                assert await code_of(adapters.resolve("a0")) == "catalog_unavailable"
                assert await code_of(adapters.resolve("a b")) == "invalid_adapter_reference"
            await eventually(lambda: code_of(adapters.resolve("a0")), lambda code: code == "found")
            assert await code_of(adapters.resolve("broken")) == "adapter_malformed"

    async def test_a_router_starts_without_its_store(self, tmp_path: Path) -> None:
        """Names are resolved at once, since residents can be served; what is to be imported comes later."""
        seeded = library_over(SqlCatalog.open(f"sqlite:///{tmp_path / 'catalog.db'}"), tmp_path)
        seeded.import_directory("bot", lora(tmp_path, 1))
        is_down = True

        def library(catalog: SqlCatalog) -> AdapterLibrary:
            if is_down:
                raise StoreUnavailable("the mount is not there")
            return library_over(catalog, tmp_path)

        adapters = AdapterService(lambda: seeded.catalog, library, configured(DIRECTORIES), Metrics())
        async with following(adapters):
            assert (await adapters.resolve("bot")).number == 1
            adapters._resolve_timeout_s = 0.2  # until then, the import of a0 is waited for
            assert await code_of(adapters.resolve("a0")) == "catalog_unavailable"
            with pytest.raises(StoreUnavailable):
                await adapters.with_library(lambda library: library, 1, Right(("default",), {}), ANYBODY)
            is_down = False
            await eventually(lambda: code_of(adapters.resolve("a0")), lambda code: code == "found")

    def test_what_no_other_try_mends_ends_the_start(self, tmp_path: Path) -> None:
        def too_new() -> SqlCatalog:
            raise CatalogTooNew("made by a newer release")

        with pytest.raises(CatalogTooNew):
            AdapterService(too_new, lambda catalog: library_over(catalog, tmp_path), {}, Metrics()).open()


class TestTheAdaptersOfTheConfiguration:
    @pytest.mark.slow
    async def test_why_one_is_not_served_names_no_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever may ask for completions learns neither where the directory lies nor where the store is."""
        monkeypatch.setattr(managed_adapters_module, "_START_S", 0.2)
        adapters = managed_adapters(tmp_path, none=tmp_path / "none", **DIRECTORIES)
        adapters.open()
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_bytes(b"no folder")
        async with adapters.following():
            for name, code in (("a0", "store_unavailable"), ("broken", "malformed"), ("none", "missing")):
                with pytest.raises(AdapterError) as caught:
                    await adapters.resolve(name)
                assert caught.value.code == f"adapter_{code}"
                with pytest.raises(AdapterError) as again:
                    await adapters.resolve(name)
                assert again.value is not caught.value  # its traceback would grow, and hold on to requests
                said = str(caught.value)
                assert not any(word in said for word in (str(tmp_path), str(TEMPLATE), "file://")), said
            (tmp_path / "store").unlink()
            (tmp_path / "away").rename(tmp_path / "store")
            await eventually(lambda: code_of(adapters.resolve("a0")), lambda code: code == "found")

    def test_an_import_ends_with_its_tenant(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = library_over(SqlCatalog.open(f"sqlite:///{tmp_path / 'catalog.db'}"), tmp_path)
        directory = lora(tmp_path, 1)
        assert import_if_new(library, "acme/bot", directory).number == 1

        def pack_while_the_tenant_is_deleted(*arguments: Any) -> Any:
            library.remove_tenant("acme")
            return pack_directory(*arguments)

        monkeypatch.setattr(configured_adapters, "pack_directory", pack_while_the_tenant_is_deleted)
        with pytest.raises(RightWithdrawn, match="the tenant 'acme' was deleted after this change began"):
            import_if_new(library, "acme/bot", lora(tmp_path, 2))
        assert not any(library.catalog.tenants.remains("acme").values())
        library.catalog.close()

    def test_content_that_is_known_is_not_written_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        catalog = SqlCatalog.open(f"sqlite:///{tmp_path / 'catalog.db'}")
        library, directory = library_over(catalog, tmp_path), lora(tmp_path, 1)
        added: list[Any] = []
        assert import_if_new(library, "bot", directory, added.append).number == 1
        monkeypatch.setattr(packing, "write_packed", lambda *_: pytest.fail("it is written"))
        assert import_if_new(library, "bot", directory, added.append).number == 1
        assert [(old, new.number) for old, new in added] == [(None, 1)]
        catalog.close()

    def test_aliases_stay_where_they_were_put(self, tmp_path: Path) -> None:
        library = library_over(SqlCatalog.open(f"sqlite:///{tmp_path / 'catalog.db'}"), tmp_path)
        name, old, new = "bot", lora(tmp_path, 1), lora(tmp_path, 2)
        assert import_if_new(library, name, old).number == 1
        assert import_if_new(library, name, new).number == 2
        assert library.catalog.resolve("bot").number == 2  # new content is the latest
        assert import_if_new(library, name, old).number == 1
        assert library.catalog.resolve("bot").number == 2  # known content is not
        library.store.delete(library.catalog.resolve("bot@r1").revision_id)
        assert import_if_new(library, name, old).number == 1
        assert library.catalog.resolve("bot").number == 2
        assert library.store.verify(library.catalog.resolve("bot@r1").revision_id)
        library.catalog.close()

    async def test_a_known_adapter_outlives_its_directory(self, tmp_path: Path) -> None:
        directory = shutil.copytree(TEMPLATE / "a0", tmp_path / "directory")
        async with following(managed_adapters(tmp_path / "router", a0=directory)) as adapters:
            assert (await adapters.resolve("a0")).revision_id == REVISION_ID
        shutil.rmtree(directory)
        async with following(managed_adapters(tmp_path / "router", a0=directory)) as adapters:
            assert (await adapters.resolve("a0")).revision_id == REVISION_ID

    async def test_a_deleted_one_stays_deleted(self, tmp_path: Path) -> None:
        async with following(managed_adapters(tmp_path, a0=DIRECTORIES["a0"])) as adapters:
            await adapters.with_catalog(lambda catalog: catalog.delete("default", "a0"))
        async with following(managed_adapters(tmp_path, a0=DIRECTORIES["a0"])) as adapters:
            with pytest.raises(AdapterNotFound, match="restore it"):
                await adapters.resolve("a0")

    def test_names_are_checked(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is not an adapter name"):
            managed_adapters(tmp_path, **{"a b": tmp_path})
        with pytest.raises(ValueError, match="given twice"):
            managed_adapters(tmp_path, **{"a": tmp_path, "default/a": tmp_path})


def staleness_s(page: str) -> float:
    (line,) = [each for each in page.splitlines() if each.startswith("prelude_router_catalog_staleness_seconds ")]
    return float(line.split()[1])


class TestOverHttp:
    @pytest.mark.slow
    async def test_a_catalog_that_is_away(self, database: CatalogDatabase, tmp_path: Path) -> None:
        """The base model and known names are served, others get 503 with retry-after, and then they are served."""
        catalog = SqlCatalog.open(database.url)
        library_over(catalog, tmp_path / "router").import_directory("late", lora(tmp_path, 5))
        catalog.close()
        async with running_cluster(folder=tmp_path / "router", catalog_url=database.url) as cluster:
            await cluster.adapters.refresh()  # a change that comes in meanwhile keeps an answer out of the memory
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            with database.down(cluster.adapters._catalog):
                status, answer, headers = await cluster.post(prompt="Hi", adapter="late")
                assert (status, answer["error"]["code"]) == (503, "catalog_unavailable")
                assert headers["retry-after"] == "1"
                assert not any(word in answer["error"]["message"] for word in ("sqlite", "postgres"))
                assert (await cluster.post(prompt="Hi"))[0] == 200
                status, _, headers = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, headers["x-prelude-revision"]) == (200, REVISION_ID)
                assert (await cluster.get("/v1/models"))[0] == 503
                await until(lambda: cluster.adapters.staleness_s > 1)
                assert staleness_s(await cluster.metrics_page()) > 1
                assert (await cluster.get("/ready"))[0] == 200
            await eventually(lambda: cluster.post(prompt="Hi", adapter="late"), lambda answer: answer[0] == 200)
            await until(lambda: cluster.adapters.staleness_s < 1)
            assert 'prelude_router_resolutions_total{outcome="unavailable"}' in await cluster.metrics_page()

    async def test_not_ready_before_the_catalog_has_opened(self, tmp_path: Path) -> None:
        """A load balancer sends requests to routers that know the adapters; the base model is served all the same."""
        folder = tmp_path / "absent"
        async with running_cluster(folder=tmp_path, catalog_url=f"sqlite:///{folder}/catalog.db") as cluster:
            status, page = await cluster.get("/ready")
            assert (status, page["ready"]) == (503, False)
            assert "catalog or the adapter store has not been reachable" in page["reason"]
            assert (await cluster.post(prompt="Hi"))[0] == 200
            folder.mkdir()
            await cluster.is_ready()
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200

    async def test_models_come_in_pages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status_pages, "MAX_PAGE", 4)
        async with running_cluster(folder=tmp_path, directories={}) as cluster:
            for number in range(5):
                add(cluster.adapters._catalog, f"m{number}", number)
            status, page = await cluster.get("/v1/models")
            assert (status, page["has_more"], page["last_id"]) == (200, True, "m3")
            assert [card["id"] for card in page["data"]] == ["base", "m0", "m1", "m2", "m3"]
            status, page = await cluster.get("/v1/models?after=m3")
            assert (status, page["has_more"], page["last_id"]) == (200, False, "m4")
            assert [card["id"] for card in page["data"]] == ["m4"]
            assert (await cluster.get("/v1/models?after=a%20b"))[0] == 400
