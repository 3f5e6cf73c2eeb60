"""Two tenants train at once with the unmodified SDK, through a real router: each has its own, and sees no more."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tinker
from support.in_thread import in_thread
from support.routers.keyed_cluster import keyed_cluster
from support.training.trainer import ADAM, SECRET, RawClient, data, make_service, sdk_data, served
from support.waiting import wait_until

from adapters.scopes import Scope
from router.api.training import TrainerAddress
from training.executor.turns import Share
from training.runs.base import LoadedBase
from training.service import app as service_app
from training.service.app import Service
from training.service.identity import CallsOfRouter

pytestmark = pytest.mark.slow

STEPS = 4


class Routed(NamedTuple):
    url: str  # of the router
    keys: dict[str, str]  # by tenant, as the SDK sends them


@contextmanager
def routing(folder: Path, base: LoadedBase, **options: Any) -> Iterator[tuple[Routed, Service]]:
    service = make_service(base, folder / "trainer", identities=CallsOfRouter(SECRET), **options)

    @asynccontextmanager
    async def router(trainer: str) -> AsyncIterator[Routed]:
        async with keyed_cluster(folder, 0, 0, trainer=TrainerAddress(trainer, SECRET)) as keyed:
            keys = {name: f"tml-{await keyed.key(name, {Scope.TRAIN})}" for name in ("acme", "beta")}
            yield Routed(keyed.cluster.url, keys)

    with served(service.app()) as trainer, in_thread(router(trainer)) as found:
        yield found, service


@pytest.fixture(scope="module")
def routed(base: LoadedBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with routing(tmp_path_factory.mktemp("routed"), base) as (found, _):
        yield found


def client_of(routed: Routed, tenant: str) -> RawClient:
    return RawClient(routed.url, routed.keys[tenant])


def trained(routed: Routed, tenant: str) -> tuple[list[Any], str, tinker.ServiceClient]:
    """Every number of a run, and the path of its checkpoint."""
    service = tinker.ServiceClient(base_url=routed.url, api_key=routed.keys[tenant])
    model = service.create_lora_training_client(base_model="demo", rank=4, seed=7).result()
    sent = [(model.forward_backward(sdk_data(n), "cross_entropy"), model.optim_step(ADAM)) for n in range(STEPS)]
    numbers = [(one.result().metrics, two.result().metrics) for one, two in sent]
    path = model.save_state("end").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    numbers.append(resumed.forward(sdk_data(9), "cross_entropy").result().metrics)
    return numbers, path, service


def test_two_tenants_at_once_train_as_each_alone(routed: Routed):
    alone, _, service = trained(routed, "acme")
    service.close("success").result()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda tenant: trained(routed, tenant), routed.keys))
    assert [numbers for numbers, _, _ in found] == [alone, alone]
    for (tenant, key), (_, path, _) in zip(routed.keys.items(), found, strict=True):
        rest = tinker.RestClient(base_url=routed.url, api_key=key)
        runs = rest.list_training_runs().result().training_runs
        assert {(run.model_owner, run.lora_rank) for run in runs} == {(tenant, 4)}
        assert path.split("/")[2] in {run.training_run_id for run in runs}
        assert rest.get_training_run(path.split("/")[2]).result().model_owner == tenant
        page = rest.list_training_runs(limit=1, offset=1).result()
        assert [page.cursor.total_count >= 2, len(page.training_runs)] == [True, 1]
    (_, path, acme), (_, _, beta) = found
    with pytest.raises(tinker.NotFoundError, match="there is no"):
        beta.create_training_client_from_state(path).result()
    for each in (acme, beta):
        each.close("success").result()


def test_another_tenants_ids_are_not_found(routed: Routed):
    client, other = client_of(routed, "acme"), client_of(routed, "beta")
    session = client.session()
    model = client.model(0, session)
    saved = client.result(client.post("save_weights", model_id=model, seq_id=1, path="mine"))["path"]
    sampler = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="demo")
    sampler_id = sampler.json()["sampling_session_id"]
    other_model = other.model()
    params: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {}}
    asked = [
        other.post(f"sessions/{session}/finish", reason={"type": "success"}),
        other.post("create_model", session_id=session, model_seq_id=1, base_model="demo", lora_config={"rank": 4}),
        other.post("get_info", model_id=model),
        other.forward_backward(model, 2, *data(1)),
        other.optim_step(model, 2),
        other.post("save_weights", model_id=model, seq_id=2, path="theirs"),
        other.post("save_weights_for_sampler", model_id=model, seq_id=2, path="theirs"),
        other.post("load_weights", session_id=other.session(), model_seq_id=3, path=saved, optimizer=False),
        other.post("weights_info", tinker_path=saved),
        other.post("retrieve_future", request_id=f"{model}#1"),
        other.post("retrieve_future", request_id=f"{sampler_id}#0"),
        other.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="demo"),
        other.post("asample", sampling_session_id=sampler_id, seq_id=0, **params),
        other.http.get(f"/samplers/{sampler_id}"),
        other.http.get(f"/training_runs/{model}"),
        other.http.delete(f"/training_runs/{model}/checkpoints/weights/mine"),
    ]
    assert other.post("session_heartbeat", session_id=session).status_code == 410  # as of any that has ended
    loaded = other.post("load_weights", model_id=other_model, seq_id=1, path=saved, optimizer=True)
    assert "there is no" in other.error(loaded)
    assert [(answer.status_code, answer.request.url.path) for answer in asked if answer.status_code != 404] == []
    assert client.result(client.post("save_weights", model_id=model, seq_id=2, path="more"))["path"].endswith("/more")
    assert client.post("weights_info", tinker_path=saved).json()["lora_rank"] == 4


async def test_a_later_tenant_of_the_name_has_nothing_of_the_earlier_one(base: LoadedBase, tmp_path: Path):
    service = make_service(base, tmp_path / "trainer", identities=CallsOfRouter(SECRET))
    with served(service.app()) as trainer:
        async with keyed_cluster(tmp_path, 0, 0, trainer=TrainerAddress(trainer, SECRET)) as keyed:

            def saved(key: str) -> tuple[RawClient, str, str]:
                client = RawClient(keyed.cluster.url, f"tml-{key}")
                model = client.model()
                path = client.result(client.post("save_weights", model_id=model, seq_id=1, path="mine"))["path"]
                return client, model, path

            _, model, path = await asyncio.to_thread(saved, await keyed.key("acme", {Scope.TRAIN}))
            keyed.catalog.tenants.remove("acme")
            later, own, _ = await asyncio.to_thread(saved, await keyed.key("acme", {Scope.TRAIN}))

            def looked() -> None:
                runs = later.http.get("/training_runs").json()["training_runs"]
                assert [(run["training_run_id"], run["model_owner"]) for run in runs] == [(own, "acme")]
                assert later.http.get("/checkpoints").json()["cursor"]["total_count"] == 1
                assert later.post("get_info", model_id=model).status_code == 404
                assert later.post("weights_info", tinker_path=path).status_code == 404
                gone = later.http.delete(f"/training_runs/{model}/checkpoints/weights/mine")
                assert gone.status_code == 404

            await asyncio.to_thread(looked)


def test_a_tenant_over_its_limit_waits_and_holds_up_nobody(
    base: LoadedBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def share_of(tenant: str) -> Share:
        return Share(tokens_per_min=60 if tenant == "acme" else None)

    now = [0.0]
    monkeypatch.setattr(service_app, "_POLL_S", 0.1)
    with routing(tmp_path, base, share_of=share_of) as (routed, service):
        service._commands.executor._turns.clock = lambda: now[0]
        acme = client_of(routed, "acme")
        model = acme.model()
        sent = [acme.forward_backward(model, seq, *data(seq)) for seq in range(1, 9)]  # of 11 tokens
        for future in sent[:6]:
            acme.result(future)
        paused = acme.post("retrieve_future", request_id=sent[6].json()["request_id"]).json()
        reason = "acme has used its training_tokens_per_min; it goes on in 7 s"  # it owes 6
        assert {**paused, "request_id": ""} == {
            "type": "try_again", "request_id": "", "queue_state": "paused_capacity", "queue_state_reason": reason,
        }  # fmt: skip
        trained(routed, "beta")[2].close("success").result()
        assert b"paused_capacity" in acme.post("retrieve_future", request_id=sent[6].json()["request_id"]).content
        now[0] = 7.0
        client_of(routed, "beta").model()  # the executor looks again
        acme.result(sent[6])
        assert b"paused_capacity" in acme.post("retrieve_future", request_id=sent[7].json()["request_id"]).content


def test_a_hundred_times_the_load_takes_no_more_than_turns(base: LoadedBase, tmp_path: Path):
    """By the order in which commands are computed: between two of the other tenant's there is one at most."""
    may_compute, order = threading.Event(), list[str]()
    with routing(tmp_path, base) as (routed, service):
        commands = service._commands
        sdks = [tinker.ServiceClient(base_url=routed.url, api_key=key) for key in routed.keys.values()]
        acme, beta = [each.create_lora_training_client(base_model="demo", rank=4, seed=1).result() for each in sdks]

        def command(model: str, seq: int) -> Any:
            may_compute.wait()
            order.append(commands.models[model].model.tenant)
            return type(commands).command(commands, model, seq)

        commands.command = command  # type: ignore[method-assign]
        load = [acme.forward_backward(sdk_data(n), "cross_entropy") for n in range(100)]
        own = [beta.forward_backward(sdk_data(n)[:1], "cross_entropy") for n in range(3)]
        own.append(beta.optim_step(ADAM))
        wait_until(lambda: [len(commands.journal.seqs(each)) for each in commands.models] == [101, 5])
        may_compute.set()
        for future in (*own, *load):
            future.result()
        at = [index for index, tenant in enumerate(order) if tenant == "beta"]
        assert (len(order), len(at)) == (104, 4)
        assert at[0] <= 2  # the command that is computed already, and one
        assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(at))
        for each in sdks:
            each.close("success").result()
