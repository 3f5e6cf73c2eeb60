"""Two tenants train at once with the unmodified SDK, through a real router: each has its own, and sees no more."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
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
from training.service.identity import CallsOfRouter

pytestmark = pytest.mark.slow

STEPS = 4


class Routed(NamedTuple):
    url: str  # of the router
    keys: dict[str, str]  # by tenant, as the SDK sends them


@asynccontextmanager
async def router_with_keys(folder: Path, trainer: str) -> AsyncIterator[Routed]:
    async with keyed_cluster(folder, 0, 0, trainer=TrainerAddress(trainer, SECRET)) as keyed:
        keys = {name: f"tml-{await keyed.key(name, {Scope.TRAIN})}" for name in ("acme", "beta")}
        yield Routed(keyed.cluster.url, keys)


@pytest.fixture(scope="module")
def routed(base: LoadedBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("routed")
    service = make_service(base, folder / "trainer", identities=CallsOfRouter(SECRET))
    with served(service.app()) as trainer, in_thread(router_with_keys(folder, trainer)) as found:
        yield found


def client(routed: Routed, tenant: str) -> RawClient:
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
    (_, path, acme), (_, _, beta) = found
    with pytest.raises(tinker.NotFoundError, match="there is no"):
        beta.create_training_client_from_state(path).result()
    for each in (acme, beta):
        each.close("success").result()


def test_what_is_anothers_is_not_there(routed: Routed):
    acme, beta = client(routed, "acme"), client(routed, "beta")
    session, own = acme.session(), beta.session()
    model = acme.model(0, session)
    future = acme.forward_backward(model, 1, *data(1))
    acme.result(future)
    path = acme.result(acme.post("save_weights", model_id=model, seq_id=2, path="kept"))["path"]
    created = acme.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="demo")
    sampler = created.json()["sampling_session_id"]
    prompt = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}}
    sample = acme.post("asample", sampling_session_id=sampler, seq_id=1, **prompt)
    assert sample.status_code == 200, sample.text
    checkpoint = f"/training_runs/{model}/checkpoints/weights/kept"
    with_lora = {"base_model": "demo", "lora_config": {"rank": 4}}

    def asked(other: RawClient, at: str, number: int) -> dict[str, httpx.Response]:
        """Everything that names what is acme's; `at`: the session that new things are for."""
        loaded = {"session_id": own if other is beta else session, "model_seq_id": 90 + number, "path": path}
        return {
            "heartbeat": other.post("session_heartbeat", session_id=session),
            "create_model": other.post("create_model", session_id=session, model_seq_id=80 + number, **with_lora),
            "get_info": other.post("get_info", model_id=model),
            "forward_backward": other.forward_backward(model, 3, *data(1)),
            "optim_step": other.optim_step(model, 4),
            "save_weights": other.post("save_weights", model_id=model, seq_id=5, path=f"x{number}"),
            "for_sampler": other.post("save_weights_for_sampler", model_id=model, seq_id=6, path=f"y{number}"),
            "load": other.post("load_weights", **loaded, optimizer=True),
            "load_into": other.post("load_weights", model_id=model, seq_id=7, path=path, optimizer=True),
            "weights_info": other.post("weights_info", tinker_path=path),
            "future": other.post("retrieve_future", request_id=future.json()["request_id"]),
            "sampler": other.http.get(f"/samplers/{sampler}"),
            "sample": other.post("asample", sampling_session_id=sampler, seq_id=2 + number, **prompt),
            "sampled": other.post("retrieve_future", request_id=sample.json()["request_id"]),
            "new_sampler": other.post(
                "create_sampling_session", session_id=at, sampling_session_seq_id=70 + number, base_model="demo"
            ),
            "delete": other.http.delete(checkpoint),
            "finish": other.post(f"sessions/{session}/finish", reason={"type": "success"}),
        }

    answers = {name: answer.status_code for name, answer in asked(beta, session, 0).items()}
    assert answers == dict.fromkeys(answers, 404) | {"heartbeat": 410}  # which ends the SDK's loop
    unknown = beta.post("get_info", model_id=model[::-1]).json()["error"].replace(model[::-1], model)
    assert beta.post("get_info", model_id=model).json()["error"] == unknown  # as of what is nobody's
    answers = {name: answer.status_code for name, answer in asked(acme, session, 1).items()}
    assert answers == dict.fromkeys(answers, 200) | {"delete": 204}


def test_a_tenant_over_its_limit_waits_and_holds_up_nobody(
    base: LoadedBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def share_of(tenant: str) -> Share:
        return Share(tokens_per_min=60 if tenant == "acme" else None)

    service = make_service(base, tmp_path / "trainer", identities=CallsOfRouter(SECRET), share_of=share_of)
    now = [0.0]
    service._commands._executor._turns.clock = lambda: now[0]
    monkeypatch.setattr("training.service.app._POLL_S", 0.1)
    with served(service.app()) as trainer, in_thread(router_with_keys(tmp_path, trainer)) as routed:
        acme = client(routed, "acme")
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
        client(routed, "beta").model()  # the executor looks again
        acme.result(sent[6])
        assert b"paused_capacity" in acme.post("retrieve_future", request_id=sent[7].json()["request_id"]).content


def test_a_hundred_times_the_load_takes_no_more_than_turns(base: LoadedBase, tmp_path: Path):
    """By the order in which commands are computed: between two of the other tenant's there is one at most."""
    service = make_service(base, tmp_path / "trainer", identities=CallsOfRouter(SECRET))
    commands, may_compute, order = service._commands, threading.Event(), []

    def command(model: str, seq: int) -> Any:
        may_compute.wait()
        order.append(commands.models[model].model.tenant)
        return type(commands).command(commands, model, seq)

    commands.command = command  # type: ignore[method-assign]
    with served(service.app()) as trainer, in_thread(router_with_keys(tmp_path, trainer)) as routed:
        sdks = {name: tinker.ServiceClient(base_url=routed.url, api_key=key) for name, key in routed.keys.items()}
        may_compute.set()
        models = {
            name: each.create_lora_training_client(base_model="demo", rank=4, seed=1).result()
            for name, each in sdks.items()
        }
        may_compute.clear()
        order.clear()
        load = [models["acme"].forward_backward(sdk_data(n), "cross_entropy") for n in range(100)]
        own = [models["beta"].forward_backward(sdk_data(n)[:1], "cross_entropy") for n in range(3)]
        own.append(models["beta"].optim_step(ADAM))
        wait_until(lambda: [len(commands.journal.seqs(each)) for each in commands.models] == [101, 5])
        may_compute.set()
        for future in (*own, *load):
            future.result()
        at = [index for index, tenant in enumerate(order) if tenant == "beta"]
        assert (len(order), len(at)) == (104, 4)
        assert at[0] <= 2  # the command that is computed already, and one
        assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(at))
        for each in sdks.values():
            each.close("success").result()


def test_a_key_without_the_scope_trains_nothing(routed: Routed):
    raw = RawClient(routed.url, "tml-prelude_unknown")
    assert raw.post("create_session").status_code == 401
    forged = {"x-api-key": routed.keys["beta"], "x-prelude-tenant": "acme", "x-prelude-credential": routed.keys["acme"]}
    session = client(routed, "acme").session()
    assert RawClient(routed.url, headers=forged).post("session_heartbeat", session_id=session).status_code == 410
