"""Metrics of imports, pushes and other changes of adapters."""

import asyncio
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.adapters.catalog_databases import SqliteDatabase
from support.router_stand_ins import REVISION_ID, ClusterStandIn, eventually
from support.routers.management_calls import answered_by, ask, every_change, managing

from adapters.catalog.sql import SqlCatalog

MANAGEMENT = True


class TestMetrics:
    async def test_every_change_is_counted_by_its_kind_and_result(
        self, tmp_path: Path, cluster: ClusterStandIn
    ) -> None:
        """One request of each kind that is done, and one that is refused; what only reads is not counted."""
        changes = every_change(tmp_path)
        expected: dict[tuple[str, str], int] = {}
        for kind, (method, path, options) in changes.items():
            status, answer = await ask(cluster, method, path, **options)
            assert status < 300, (kind, answer)
            expected[kind, "done"] = 1
            assert await changes_of(cluster) == expected
        for kind, (method, path, _) in changes.items():
            wrong = path.replace("/bot", "/no-such-adapter")
            assert 400 <= (await ask(cluster, method, wrong, json={"bot": "one"}))[0] < 500, kind
            expected[kind, "refused"] = 1
            assert await changes_of(cluster) == expected
        await ask(cluster, "GET", "/v1/adapters")
        await ask(cluster, "GET", "/v1/adapters/bot")
        assert await changes_of(cluster) == expected

    @pytest.mark.slow
    async def test_what_failed_or_was_left(self, tmp_path: Path) -> None:
        database = SqliteDatabase(tmp_path / "catalog")
        SqlCatalog.open(database.url).close()  # makes the tables
        async with managing(2, 1, folder=tmp_path / "router", catalog_url=database.url) as cluster:
            with database.down(cluster.adapters._catalog):
                assert (await ask(cluster, "POST", "/v1/adapters/a0/rollback"))[0] == 503
            first, second = cluster.prefill
            first.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
            status, answer = await ask(cluster, "POST", "/v1/adapters/a0/prewarm")
            assert (status, answer["workers"]["p0"]["error"]["code"]) == (200, "adapter_unavailable")  # by one of two
            first.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
            second.ensure_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert (await ask(cluster, "POST", "/v1/adapters/a0/prewarm", json={"workers": ["p0"]}))[0] == 503
            head = b"DELETE /v1/adapters/a0 HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            _, writer = await cluster.open(head + b"content-length: 9\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()
            kinds = (("rollback", "failed"), ("prewarm", "done"), ("prewarm", "failed"), ("delete", "left"))
            expected = dict.fromkeys(kinds, 1)
            await eventually(lambda: changes_of(cluster), lambda found: found == expected)
            assert await answered_by(cluster, "a0") == REVISION_ID


async def changes_of(cluster: ClusterStandIn) -> dict[tuple[str, str], int]:
    """Changes of adapters that the router has counted, by kind and result."""
    page = await cluster.metrics_page()
    [family] = [each for each in text_string_to_metric_families(page) if each.name == "prelude_router_adapter_changes"]
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {(sample.labels["kind"], sample.labels["result"]): int(sample.value) for sample in samples}
