"""Which revision of a split alias answers: shares are right, keys stay, and all routers agree."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

from prometheus_client.parser import text_string_to_metric_families
from support.adapters.catalog_databases import CatalogDatabase
from support.router_stand_ins import ClusterStandIn, answers, breaks_after, eventually, hangs, running_cluster
from support.routers.management_calls import ask, form, id_of, lora, managing, upload

from adapters.catalog.records import AdapterRevision, AliasSplit, AliasTarget
from adapters.catalog.sql import SqlCatalog
from router.alias_split import gets_newer
from router.metrics import Metrics

Series = dict[str, dict[tuple[str, ...], float]]
KEYS = [f"user {number}" for number in range(10_000)]
PROD = "/v1/adapters/acme/bot/aliases/prod"


def getting_newer(percent: int, alias: str = "acme/bot@prod") -> set[str]:
    split = AliasSplit(alias, AliasTarget.split([(1, 100 - percent), (2, percent)]), cast(AdapterRevision, None))
    return {key for key in KEYS if gets_newer(split, key)}


def test_shares_and_that_keys_stay_as_these_grow() -> None:
    found = [getting_newer(percent) for percent in range(1, 100)]
    # Kept between releases: else everybody would change the revision at an upgrade.
    assert [len(found[percent - 1]) for percent in (1, 5, 20, 50, 99)] == [106, 519, 2001, 5056, 9906]
    assert [key for key in KEYS if key in found[4]][:4] == ["user 3", "user 13", "user 51", "user 66"]
    every = [set(), *found, set(KEYS)]
    assert all(fewer < more for fewer, more in pairwise(every))
    points = [len(more - fewer) for fewer, more in pairwise(every)]
    chi_square = sum((num - 100) ** 2 / 100 for num in points)
    assert 62 < chi_square < 147  # of 99 degrees of freedom, all but one in a thousand on either side


def test_the_keys_of_one_alias_say_nothing_of_another_s() -> None:
    one, other = getting_newer(50), getting_newer(50, "acme/bot@beta")
    assert abs(len(one & other) - 2500) < 130  # three standard deviations


async def split(cluster: ClusterStandIn, folder: Path, **weights: int) -> None:
    for seed in (1, 2):
        await upload(cluster, lora(folder, seed), name="acme/bot")
    assert (await ask(cluster, "PUT", PROD, json={"weights": weights}))[0] == 200


async def test_an_answer_is_of_the_revision_that_it_names(tmp_path: Path) -> None:
    """And a key has the same at each of its requests, whichever the endpoint and whatever other fields say."""
    async with managing(1, 1, 1, directories={}) as cluster:
        await split(cluster, tmp_path, r1=50, r2=50)
        ids = [id_of(tmp_path, 1), id_of(tmp_path, 2)]
        answers = []

        async def asked(path: str, **fields: Any) -> str:
            text = {
                "/v1/completions": {"prompt": "Hi"},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
                "/v1/responses": {"input": "Hi", "store": False},
                "/v1/embeddings": {"input": "Hi"},
            }[path]
            nums = {worker: len(worker.engine.bodies) for worker in cluster.workers}
            status, answer, headers = await cluster.post(path, adapter="acme/bot@prod", **text, **fields)
            assert status == 200, answer
            revision = headers["x-prelude-revision"]
            if "system_fingerprint" in answer:
                assert answer["system_fingerprint"].endswith(revision.removeprefix("sha256:")[:12])
            bodies = [body for worker, num in nums.items() for body in worker.engine.bodies[num:]]
            other = next(each for each in ids if each != revision)
            assert any(revision.encode() in body for body in bodies)
            assert not any(other.encode() in body for body in bodies)
            answers.append(revision)
            return revision

        found = {user: await asked("/v1/completions", user=user) for user in KEYS[:24]}
        assert set(found.values()) == set(ids)
        one, two = (next(user for user in found if found[user] == each) for each in ids)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"):
            for user in KEYS[:12]:
                assert await asked(path, user=user) == found[user]
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            assert await asked(path, user=one, prompt_cache_key=two) == ids[1]  # the conversation's comes first
            assert await asked(path, user=one, safety_identifier=two) == ids[0]
            assert await asked(path, user="", safety_identifier=two) == ids[1]
        without_key = {await asked("/v1/completions") for _ in range(40)}  # of one: once in 10**12
        assert without_key == set(ids)
        await cluster.is_idle()
        counts = {("acme/bot", f"r{number}", "200"): answers.count(each) for number, each in enumerate(ids, 1)}
        assert (await split_series(cluster))["requests_total"] == counts
        status, answer, _ = await cluster.post("/v1/embeddings", input="Hi", user="x" * 1025)
        assert (status, answer["error"]["param"]) == (400, "user")


async def split_series(cluster: ClusterStandIn) -> Series:
    """The values of prelude_router_split_… by the rest of the name and by labels, without buckets."""
    found: Series = {}
    for family in text_string_to_metric_families(await cluster.metrics_page()):
        for sample in family.samples:
            name = sample.name.removeprefix("prelude_router_split_")
            if name != sample.name and not name.endswith(("_bucket", "_created", "_sum")):
                found.setdefault(name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_metrics_compare_the_revisions_until_the_split_ends(tmp_path: Path) -> None:
    """Only what comes through the alias counts, and nothing is left, whatever was in flight at the end."""
    async with managing(1, 1, directories={}) as cluster:
        await split(cluster, tmp_path, r1=50, r2=50)
        assert await split_series(cluster) == {}
        older, newer = (next(key for key in KEYS if (key in getting_newer(50)) is wanted) for wanted in (False, True))
        to_split = {"prompt": "Hi", "adapter": "acme/bot@prod"}
        engine = cluster.decode[0].engine
        for user in (older, newer, newer):
            await cluster.stream(**to_split, user=user)
        await cluster.post(**to_split, user=older)  # has no first token to time
        engine.behaviours = [breaks_after(1)]
        await cluster.stream(**to_split, user=newer)
        engine.behaviours = [answers(400)]
        await cluster.post(**to_split, user=newer)
        for adapter in ("acme/bot", "acme/bot@r1", "acme/bot@r2", None):  # which come not by the alias
            await cluster.stream(**to_split | {"adapter": adapter}, user=newer)
        await cluster.is_idle()
        of_older, of_newer = ("acme/bot", "r1"), ("acme/bot", "r2")
        found = await split_series(cluster)
        ended = {
            (*of_older, "200"): 2,
            (*of_newer, "200"): 2,
            (*of_newer, "worker_lost"): 1,
            (*of_newer, "400"): 1,
        }
        assert found == {
            "requests_total": ended,
            "time_to_first_token_seconds_count": {of_older: 1, of_newer: 3},
            "time_per_output_token_seconds_count": {of_older: 1, of_newer: 2},
        }

        engine.behaviours = [hangs]
        in_flight = asyncio.create_task(cluster.stream(**to_split, user=newer))
        await cluster.has_phase("waiting_first_event")
        assert (await ask(cluster, "PUT", PROD, json={"revision": "r2"}))[0] == 200
        await eventually(lambda: split_series(cluster), lambda found: found == {})
        in_flight.cancel()
        await cluster.is_idle()
        await eventually(lambda: split_series(cluster), lambda found: found == {})
        await cluster.stream(**to_split, user=newer)
        assert await split_series(cluster) == {}
        assert (await ask(cluster, "PUT", PROD, json={"weights": {"r1": 95, "r2": 5}}))[0] == 200
        await cluster.stream(**to_split, user=older)
        await cluster.is_idle()
        assert (await split_series(cluster))["requests_total"] == {(*of_older, "200"): 1}
        assert (await ask(cluster, "DELETE", PROD.partition("/aliases")[0]))[0] == 200  # and nobody asks for it again
        await eventually(lambda: split_series(cluster), lambda found: found == {})


def test_no_tenant_and_no_number_of_tenants_can_make_series_without_end() -> None:
    metrics = Metrics()
    current: dict[str, AdapterRevision] = {}

    def record(tenant: str, number: int) -> None:
        alias, template = f"{tenant}/bot{number}@prod", Mock(spec=AdapterRevision, tenant=tenant, number=1)
        template.full_name = f"{tenant}/bot{number}"
        template.split = Mock(spec=AliasSplit, newer=template)
        current[alias] = template
        metrics.splits.record(alias, template, "200", 0.1, 0.01)

    def num_series(tenant: str) -> int:
        return metrics.page().count(f'prelude_router_split_requests_total{{adapter="{tenant}/'.encode())

    for tenant in range(12):
        for number in range(25):
            record(f"t{tenant}", number)
    assert [num_series(f"t{tenant}") for tenant in range(12)] == [20] * 10 + [0, 0]
    current["t3/bot4@prod"].split = None  # type: ignore[misc]
    metrics.splits.end_others(current.__getitem__)
    assert num_series("t3") == 19
    record("t11", 0)
    assert num_series("t11") == 1


async def test_a_split_over_http(tmp_path: Path) -> None:
    async with managing(2, 1, directories={}) as cluster:
        await split(cluster, tmp_path, r1=95, r2=5)
        await upload(cluster, lora(tmp_path, 3), name="acme/bot")
        _, shown = await ask(cluster, "GET", "/v1/adapters/acme/bot")
        assert shown["aliases"] == {"latest": 3, "prod": 1}
        assert shown["splits"] == {"prod": {"r1": 95, "r2": 5}}
        assert (await cluster.get("/v1/models/acme/bot@prod"))[1]["weights"] == {"r1": 95, "r2": 5}
        assert "weights" not in (await cluster.get("/v1/models/acme/bot"))[1]

        wrong = [
            ({"weights": {"r1": 95}}, 400, "weights", "found r1 95); name one that gets all without a weight"),
            ({"weights": {}}, 400, "weights", "found none"),
            ({"weights": {"r1": 95, "r2": 6}}, 400, "weights", "100 together"),
            ({"weights": {"r1": 95, id_of(tmp_path, 1): 5}}, 400, "weights", "found r1 95, r1 5"),
            ({"weights": {"r1": 50, "r2": 25, "r3": 25}}, 400, "weights", "r3 25); name one"),
            ({"weights": {"r1": 99.5, "r2": 0.5}}, 400, "weights", "percent by revision"),
            ({"weights": {"r1": 10**40, "r2": 1}}, 400, "weights", "percent by revision"),
            ({"weights": {f"r{n}": 1 for n in range(1, 101)}}, 400, "weights", "found r1 1, r2 1, r3 1, …"),
            ({"weights": {"prod": 95, "r2": 5}}, 400, "weights", "'r' and a number from 1"),
            ({"weights": {"r1": 95, "r9": 5}}, 404, None, "no revision r9"),
            ({"weights": {"r1": 95, "r2": 5}, "revision": "r1"}, 400, "revision", "not both"),
            ({"revision": ""}, 400, "revision", "'r' and a number"),
            ({"revision": "r1", "expected": {"r1": 95}}, 400, "expected", "expected: the weights of an alias"),
            ({"revision": "r1", "expected": "r1"}, 409, None, "is at r1 95%, r2 5% and is not at r1"),
            ({"revision": "r1", "expected": None}, 409, None, "and is not new"),
        ]
        for fields, expected, param, said in wrong:
            status, answer = await ask(cluster, "PUT", PROD, json=fields)
            assert (status, answer["error"]["param"]) == (expected, param), answer
            assert said in answer["error"]["message"], answer
        latest = PROD.replace("prod", "latest")
        status, answer = await ask(cluster, "PUT", latest, json={"weights": {"r1": 5, "r2": 95}})
        assert (status, answer["error"]["code"]) == (400, "invalid_adapter_reference")
        for verb in ("prewarm", "evict"):
            status, answer = await ask(cluster, "POST", f"/v1/adapters/acme/bot/{verb}", json={"reference": "prod"})
            assert (status, "name acme/bot@r1 or acme/bot@r2" in answer["error"]["message"]) == (400, True)

        change = {"weights": {"r1": 80, id_of(tmp_path, 2): 20}, "expected": {"r2": 5, "r1": 95}}
        status, move = await ask(cluster, "PUT", PROD, json=change)
        assert (status, move["number"], move["from_number"]) == (200, 1, 1)
        assert (move["weights"], move["from_weights"]) == ({"r1": 80, "r2": 20}, {"r1": 95, "r2": 5})
        assert (await ask(cluster, "GET", PROD))[1]["data"][0] == move
        _, move = await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback", json={"alias": "prod"})
        assert move["weights"] == {"r1": 95, "r2": 5}

        # A push replaces both, wherever the one or the other is.
        for worker, seed in zip(cluster.prefill, (1, 2), strict=True):
            await worker.make_resident(id_of(tmp_path, seed))
        ids = [id_of(tmp_path, 1), id_of(tmp_path, 2)]
        await eventually(
            lambda: asyncio.sleep(0, [held["host"] for held in cluster.fleet.holders_of(ids)]),
            lambda held: held == [["p0"], ["p1"]],
        )
        push = form(lora(tmp_path, 4), alias="prod")
        status, answer = await ask(cluster, "POST", "/v1/adapters/acme/bot/push", data=push)
        assert (status, set(answer["workers"])) == (200, {"p0", "p1"})
        assert (await ask(cluster, "GET", "/v1/adapters/acme/bot"))[1]["splits"] == {}
        _, move = await ask(cluster, "POST", "/v1/adapters/acme/bot/rollback", json={"alias": "prod"})
        assert (move["from_number"], move["weights"]) == (4, {"r1": 95, "r2": 5})
        catalog = SqlCatalog.open(f"sqlite:///{cluster.folder / 'catalog.db'}")
        events = [(each.old, each.new) for each in catalog.audit.newest(100) if each.outcome == "done"]
        catalog.close()
        assert ("r4", "r1 95%, r2 5%") in events
        assert ("r1 95%, r2 5%", f"r4 {id_of(tmp_path, 4)}") in events


async def test_two_routers_agree(database: CatalogDatabase, tmp_path: Path) -> None:
    """Whichever moved the alias, the other follows within a second, and no key hops between them."""
    options: dict[str, Any] = {"directories": {}, "catalog_url": database.url, "management": True}
    async with (
        running_cluster(1, 1, folder=tmp_path / "one", **options) as one,
        running_cluster(1, 1, folder=tmp_path / "two", **options) as two,
    ):
        await split(one, tmp_path, r1=80, r2=20)
        newer_id = id_of(tmp_path, 2)

        async def newer_at(cluster: ClusterStandIn) -> set[str]:
            answers = {key: await cluster.post(prompt="Hi", adapter="acme/bot@prod", user=key) for key in KEYS[:16]}
            return {key for key, (_, _, headers) in answers.items() if headers["x-prelude-revision"] == newer_id}

        few = await newer_at(one)
        assert 0 < len(few) < 16
        assert await newer_at(two) == few
        assert (await ask(two, "PUT", PROD, json={"weights": {"r1": 40, "r2": 60}}))[0] == 200
        more = await newer_at(two)
        assert few < more
        assert await eventually(lambda: newer_at(one), lambda found: found == more) == more
        assert (await ask(one, "PUT", PROD, json={"revision": "r2"}))[0] == 200
        await eventually(lambda: newer_at(two), lambda found: len(found) == 16)
