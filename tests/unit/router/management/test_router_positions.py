"""Every way in of an adapter whose files say nothing of positions: none serves it for the prompt unasked."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora
from support.router_stand_ins import BASE, ClusterStandIn, adapters
from support.routers.management_calls import answered_by, ask, files_of, form, imported, managing

from cluster.config.schema import AdapterConfig

# A path, and the fields of a form.
WAYS: list[tuple[str, dict[str, str]]] = [
    ("/v1/adapters", {"name": "bot"}),
    ("/v1/adapters/bot/push", {}),
    ("/v1/adapters/bot/push", {"memory_only": "true"}),
]


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    return write_random_lora(tmp_path / "silent", BASE, seed=1, config={"prelude": None})


def serving(monkeypatch: pytest.MonkeyPatch, *, has_unified: bool) -> None:
    monkeypatch.setattr(adapters, "LIMITS", replace(adapters.LIMITS, serves_all_positions=has_unified))


async def shown(cluster: ClusterStandIn) -> tuple[str, str | None]:
    status, answer = await ask(cluster, "GET", "/v1/adapters/bot")
    assert status == 200, answer
    return answer["latest"]["positions"], answer["latest"]["trained_positions"]


@pytest.mark.parametrize(("path", "fields"), WAYS)
async def test_with_a_unified_worker_it_is_applied_everywhere(
    silent: Path, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, str]
) -> None:
    serving(monkeypatch, has_unified=True)
    async with managing(1, 1, 1) as cluster:
        status, answer = await ask(cluster, "POST", path, data=form(files_of(silent), **fields))
        assert status in (200, 201), answer
        assert await shown(cluster) == ("all", None)
        revision = (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["revisions"][0]
        assert any("do not say for which positions" in each for each in revision["warnings"])
        assert str(await answered_by(cluster, "bot")).startswith("sha256:")
        assert len(cluster.unified[0].engine.bodies) == 1


@pytest.mark.parametrize(("path", "fields"), WAYS)
async def test_pairs_refuse_it_until_someone_asks_for_the_prompt(
    silent: Path, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, str]
) -> None:
    serving(monkeypatch, has_unified=False)
    async with managing() as cluster:
        status, answer = await ask(cluster, "POST", path, data=form(files_of(silent), **fields))
        assert (status, answer["error"]["code"]) == (422, "adapter_unsupported"), answer
        for remedy in ("prelude adapters convert", "--positions prefill"):
            assert remedy in answer["error"]["message"]
        assert await answered_by(cluster, "bot") == 404
        for wrong in ("all", "Prefill", ""):
            status, answer = await ask(cluster, "POST", path, data=form(files_of(silent), **fields, positions=wrong))
            assert (status, answer["error"]["param"]) == (400, "positions"), answer
        status, answer = await ask(cluster, "POST", path, data=form(files_of(silent), **fields, positions="prefill"))
        assert status in (200, 201), answer
        assert await shown(cluster) == ("prefill", "all")
        status, _, headers = await cluster.post(prompt="Hi", adapter="bot")
        assert (status, headers["x-prelude-trained-positions"]) == (200, "all")
        cards = {each["id"]: each for each in (await ask(cluster, "GET", "/v1/models"))[1]["data"]}
        assert (cards["bot"]["positions"], cards["bot"]["trained_positions"]) == ("prefill", "all")


async def test_adapters_of_cluster_yaml(
    silent: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving(monkeypatch, has_unified=False)
    directories = {"bot": AdapterConfig(path=silent, positions="prefill"), "mute": silent}

    async with managing(directories=directories) as cluster:
        await imported(cluster, "bot")
        assert await shown(cluster) == ("prefill", "all")
        status, answer, _ = await cluster.post(prompt="Hi", adapter="mute")
        assert (status, answer["error"]["code"]) == (422, "adapter_unsupported")
        assert "prelude adapters convert" in answer["error"]["message"]
    logged = [getattr(each, "fields", {}).get("warning", "") for each in caplog.records]
    assert sum("as was asked for" in each for each in logged) == 1
