"""Weights for samplers are revisions of the router's, and every sample names the one that it comes from.

A real router over stand-ins of workers; tests/cluster/adapters/test_trained_by_tinker.py has real engines.
"""

import asyncio
import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.clusters.certificates import authority, issued
from support.held_calls import Held, failing
from support.in_thread import in_thread
from support.router_stand_ins import BASE, LIMITS, MODEL, ClusterStandIn
from support.router_stand_ins.engine import NUM_PROMPT_TOKENS, answers
from support.routers.keyed_cluster import keyed_cluster
from support.routers.management_calls import managing
from support.training.trainer import SECRET, RawClient, data, datum, logprobs_of, make_service, send, served, serving
from support.waiting import wait_until
from tinker import types
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.files.digest import sha256_of_chunks
from adapters.files.locked_folder import SHARED_MEMORY
from adapters.formats import read_adapter
from adapters.model.manifest import Manifest, revision_id_of_packed
from adapters.packed import read_packed, write_packed
from adapters.scopes import Scope
from process.certificates.contexts import Following, make_pinned_context, make_server_context
from process.certificates.files import CertificateFiles
from router.api.training import TrainerAddress
from training.errors import PushFailed
from training.runs.base import LoadedBase
from training.runs.push import PushTarget
from training.service import app as service_app
from training.service import commands as service_commands
from training.service import models as service_models
from training.service import publishing
from training.service import sampling as service_sampling
from training.service.app import Service
from training.service.data.rollouts import Rollouts
from training.service.errors import Busy, Gone
from training.service.identity import CallsOfRouter, headers_of_router
from training.service.journal import Journal, Model, Pushed, Sampler
from training.service.messages import ModelInput, Sample, SamplingParams, TextChunk
from training.service.publishing import Publisher
from training.service.sampling import Sampling
from training.trainable.packed import ServedWeights

pytestmark = pytest.mark.slow

PARAMS = types.SamplingParams(max_tokens=4, seed=7, stop=[9])
PROMPT = types.ModelInput.from_ints([3, 4, 5])
Make = Callable[..., Service]
KEY = "tml-default"  # the tenant that a router without keys has


@pytest.fixture(scope="module")
def routed() -> LoadedBase:
    """The model that the stand-ins pretend to serve."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=BASE.vocabulary,
        hidden_size=BASE.hidden,
        intermediate_size=48,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return LoadedBase(LlamaForCausalLM(config).eval(), None, BASE, frozenset())


@pytest.fixture
def cluster() -> Iterator[ClusterStandIn]:
    """A router and one unified worker."""
    with in_thread(managing(0, 0, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET))) as found:
        found.unified[0].engine.words = ("a",)
        yield found


@pytest.fixture
def new_service(routed: LoadedBase, folder: Path, cluster: ClusterStandIn) -> Make:
    """Makes a training service that pushes to the router."""
    return partial(make_service, routed, folder, cluster.url, MODEL)


@contextmanager
def session_of(service: Service) -> Iterator[tuple[RawClient, str]]:
    """A client of a service that runs meanwhile, and a session."""
    with served(service.app()) as url:
        client = RawClient(url, KEY)
        yield client, client.session()


def revision_in(folder: Path, name: str) -> str:
    """Of the adapter that a checkpoint has, in packed form."""
    [checkpoint] = folder.glob(f"checkpoints/*/{name}")
    adapter, packed = read_adapter(checkpoint, BASE, LIMITS), folder / f"{name}.packed"
    write_packed(adapter, BASE, "float32", packed)
    manifest = Manifest.of(adapter)
    folded = replace(manifest, lora=tuple(replace(entry, scale=1.0) for entry in manifest.lora))
    return revision_id_of_packed(folded.to_json(), sha256_of_chunks(read_packed(packed).data))


def connect(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=KEY)


def train_step(model: Any, number: int) -> None:
    tokens = [3 + (number + index) % 50 for index in range(10)]
    inputs: Any = {"target_tokens": tokens[1:], "weights": [0.0] * 4 + [1.0] * 5}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    model.forward_backward([datum], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()


def asked(cluster: ClusterStandIn) -> dict[str, Any]:
    return cluster.unified[0].engine.requests[-1]


def test_samples_come_from_the_weights_that_were_saved(new_service: Make, folder: Path, cluster: ClusterStandIn):
    with served(new_service().app()) as url:
        service = connect(url)
        model = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        samplers, revisions = [], []
        for number in range(2):
            train_step(model, number)
            model.save_state(f"s{number}").result()
            revisions.append(revision_in(folder, f"s{number}"))
            samplers.append(model.save_weights_and_get_sampling_client().result())
        assert cluster.unified[0].kept == set(revisions)
        for sampler, revision in ((samplers[0], revisions[0]), (samplers[1], revisions[1])):
            response = sampler.sample(PROMPT, 2, PARAMS).result()
            assert [sequence.tokens for sequence in response.sequences] == [[5], [5]]
            assert [list(sequence.logprobs) for sequence in response.sequences] == [[-0.5], [-0.5]]
            assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "stop"]
            ids = [sequence.sequence_id.rpartition(".")[2] for sequence in response.sequences]
            assert ids == [f"0@{revision}", f"1@{revision}"]
            sent = asked(cluster)
            assert (sent["prompt"], sent["max_tokens"], sent["stop_token_ids"]) == ([3, 4, 5], 4, [9])
        cool = types.SamplingParams(max_tokens=4, temperature=0.5)
        assert samplers[0].sample(PROMPT, 1, cool).result().sequences[0].logprobs is None
        base = service.create_sampling_client(base_model=MODEL).result().sample(PROMPT, 1, PARAMS).result()
        assert base.sequences[0].sequence_id.endswith(".0@base")


def test_a_router_has_its_certificate_whichever_host_that_names(routed: LoadedBase, folder: Path, tmp_path: Path):
    issuer = authority(tmp_path / "certs")
    files = replace(issued(issuer, "router", "router", hosts=("api.example.com",)), ca=None)
    stranger = replace(issued(issuer, "router", "stranger", hosts=("127.0.0.1",)), ca=None)
    tls = Following(files, make_server_context)
    with in_thread(managing(0, 0, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET), client_tls=tls)) as cluster:
        cluster.unified[0].engine.words = ("a",)

        def saved(number: int, trusted: CertificateFiles | None) -> Any:
            tls = (lambda: True) if trusted is None else Following(trusted, make_pinned_context).current
            with served(make_service(routed, folder, cluster.url, MODEL, router_tls=tls).app()) as url:
                model = connect(url).create_lora_training_client(base_model=MODEL, rank=4, seed=number).result()
                return model.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, PARAMS).result()

        assert saved(0, files).sequences[0].tokens == [5]
        for number, other in enumerate((None, stranger), 1):
            with pytest.raises(tinker.TinkerError, match="certificate verify failed"):
                saved(number, other)


def test_named_weights_are_stored_under_the_adapters_name(new_service: Make, folder: Path, cluster: ClusterStandIn):
    with served(new_service().app()) as url:
        service = connect(url)
        metadata = {"prelude.adapter": "bot"}
        create = service.create_lora_training_client
        model = create(base_model=MODEL, rank=4, seed=1, user_metadata=metadata).result()
        train_step(model, 0)
        model.save_state("same").result()
        path = model.save_weights_for_sampler("v1").result().path
        assert path == f"tinker://{model.model_id}/sampler_weights/v1"
        train_step(model, 1)
        model.save_weights_for_sampler("v2").result()
        sampler = service.create_sampling_client(model_path=path).result()
        [sequence] = sampler.sample(PROMPT, 1, PARAMS).result().sequences
        assert sequence.sequence_id.endswith(revision_in(folder, "same"))
        listed = asyncio.run(_get(f"{cluster.url}/v1/adapters/bot"))
        assert {"v1", "v2"} <= set(listed["aliases"])
        assert all(revision["stored"] for revision in listed["revisions"])
        with pytest.raises(tinker.NotFoundError):
            service.create_training_client_from_state(path).result()
        with pytest.raises(tinker.NotFoundError):
            tinker.ServiceClient(base_url=url, api_key="tml-other").create_sampling_client(model_path=path).result()
        kept = {each.name for each in folder.rglob("*")}
        at = f"/training_runs/{model.model_id}/checkpoints/sampler_weights/v1"
        deleted = RawClient(url, KEY).http.delete(at)
        assert deleted.status_code == 204
        assert {each.name for each in folder.rglob("*")} >= kept  # it had no files here


async def _get(url: str) -> Any:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.json()


def test_prompts_are_scored_where_that_is_the_policy(new_service: Make):
    """By the base model, by weights that are not trained yet, and by those that adapt answers, too."""
    with served(new_service().app()) as url:
        service, prompt = connect(url), types.ModelInput.from_ints([3] * NUM_PROMPT_TOKENS)
        base = service.create_sampling_client(base_model=MODEL).result()
        whole, last = (base.compute_logprobs(prompt, last_n).result() for last_n in (None, 1))
        assert whole == [-0.5] * NUM_PROMPT_TOKENS
        assert last == [None] * (NUM_PROMPT_TOKENS - 1) + [-0.5]
        create = service.create_lora_training_client
        for positions in ("all", "prefill"):
            metadata = {"prelude.positions": positions}
            model = create(base_model=MODEL, rank=4, seed=1, user_metadata=metadata).result()
            path = model.save_weights_for_sampler("untrained").result().path
            scoring = [model.save_weights_and_get_sampling_client().result()]
            scoring.append(service.create_sampling_client(model_path=path).result())
            train_step(model, 0)
            trained = model.save_weights_and_get_sampling_client().result()
            scoring += [trained] if positions == "all" else []
            for each in scoring:
                assert each.compute_logprobs(prompt).result() == whole
        with pytest.raises(tinker.BadRequestError, match="adapts prompts only"):
            trained.compute_logprobs(prompt).result()
        warm = types.SamplingParams(max_tokens=1, temperature=0.5)
        with pytest.raises(tinker.BadRequestError, match=r"temperature is 0\.5"):
            base.sample(prompt, 1, warm, include_prompt_logprobs=True).result()


def test_samples_are_trained_on_without_spans_also_after_a_restart(new_service: Make):
    """As the cookbook's rl_loop does."""
    context = [3] * NUM_PROMPT_TOKENS
    tokens, zeros = [*context, 5, 5], [0.0] * NUM_PROMPT_TOKENS
    sampled = datum(tokens, logprobs=[*zeros, -0.5], advantages=[*zeros, 1])

    with served(new_service().app()) as url:
        client = RawClient(url, KEY)
        base = connect(url).create_sampling_client(base_model=MODEL).result()
        model = client.model(base_model=MODEL)
        before = client.forward_backward(model, 1, sampled, loss_fn="importance_sampling")
        assert "nothing says where its answer begins" in client.error(before)
        base.compute_logprobs(types.ModelInput.from_ints(context)).result()  # it samples a 5, as no answer
        [sequence] = base.sample(types.ModelInput.from_ints([*context, 5]), 1, PARAMS).result().sequences
        assert sequence.tokens == [5]
        scored = client.result(client.forward_backward(model, 2, datum(tokens), forward_only=True))
        assert [each.tolist()[:-1] for each in logprobs_of(scored)] == [zeros]
    with session_of(new_service()) as (client, _):
        learned = client.result(client.forward_backward(model, 3, sampled, loss_fn="importance_sampling"))
        assert logprobs_of(learned)[0].tolist() == logprobs_of(scored)[0].tolist()


def test_failures_of_the_router_fail_futures(
    new_service: Make, routed: LoadedBase, folder: Path, cluster: ClusterStandIn
):
    with session_of(new_service()) as (client, session):
        model = client.model(0, session, base_model=MODEL)
        saved = client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        sampler = client.result(saved)["sampling_session_id"]

        def sample(seq: int, **changed: Any) -> Any:
            asked = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 4}, **changed}
            return client.post("asample", sampling_session_id=sampler, seq_id=seq, **asked)

        engine = cluster.unified[0].engine
        too_hot = client.result(sample(0, sampling_params={"max_tokens": 4, "temperature": 1000.0}))
        assert (too_hot["category"], "the router refuses: 400" in too_hot["error"]) == ("user", True)
        engine.behaviours += [answers(500)] * 3  # at every attempt
        assert client.result(sample(1))["category"] == "server"
        engine.behaviours.clear()
        engine.words = ("a", "b")  # two log-probabilities for one token
        assert client.result(sample(2))["category"] == "server"
        engine.words = ("a",)
        engine.words = ("a" * 500_000,)  # an answer in many parts
        first = client.retrieve(sample(3))
        engine.words = ("a",)
        assert first.headers["content-type"] == "application/x-protobuf"
        num_asked = len(engine.requests)
        assert client.retrieve(sample(3)).content == first.content  # a retry
        assert len(engine.requests) == num_asked
        assert sample(4, num_samples=0).status_code == 400
        for fields in ({"record_stability_info": True}, {"topk_prompt_logprobs": 1}, {"prompt_alt_tokens_k": 1}):
            assert f"{next(iter(fields))} is " in sample(4, **fields).text
        cluster_down = client.post("save_weights_for_sampler", model_id=model, seq_id=2, path="r7")
        assert "r7" in client.error(cluster_down)  # no alias may be called so
        lost = sample(5).json()["request_id"]
    with serving(routed, folder, "http://127.0.0.1:9", MODEL, key=KEY) as client:
        assert client.post("retrieve_future", request_id=lost).status_code == 410
        assert "none" in client.error(sample(5))
        unreachable = client.post("save_weights_for_sampler", model_id=model, seq_id=3, path="v1")
        assert "cannot be pushed to" in client.error(unreachable)


@pytest.mark.parametrize("snapshot_s", [0.0, 1e9])
def test_a_push_that_a_restart_interrupted_is_made(
    new_service: Make, folder: Path, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch, snapshot_s: float
):
    """Also with a snapshot after it: then its files are not written again, and must still be there."""
    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "publish", lambda *_: None)
        with session_of(new_service(snapshot_s=snapshot_s)) as (client, session):
            model = client.model(0, session, base_model=MODEL)
            for seq in (1, 2, 3):
                client.result(send(client, model, seq))
            client.result(client.post("save_weights", model_id=model, seq_id=4, path="same"))
            saved = client.post("save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=0)
            client.result(client.forward_backward(model, 6, *data(1)))
            client.result(client.optim_step(model, 7))
    with session_of(new_service(snapshot_s=snapshot_s)) as (client, _):
        assert client.result(saved) == {"sampling_session_id": f"{session}:sample:0"}
        assert cluster.unified[0].kept == {revision_in(folder, "same")}


def test_training_goes_on_during_a_push_and_the_next_one_waits(
    new_service: Make, folder: Path, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch
):
    """So at most one copy of a model's weights is in memory, and a start makes it again: no snapshot is behind it."""
    held = list[tuple[Any, ...]]()
    service = new_service(snapshot_s=0.0)

    def save(seq: int) -> Any:
        return client.post("save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq)

    with session_of(service) as (client, session):
        model = client.model(0, session, base_model=MODEL)
        for seq in (1, 2, 3):
            client.result(send(client, model, seq))
        with monkeypatch.context() as patched:
            publish = service._commands._publish
            patched.setattr(service._commands, "_publish", lambda *task: held.append(task))
            first = save(4)
            client.result(client.forward_backward(model, 5, *data(1)))
            client.result(client.optim_step(model, 6))
            client.result(client.post("save_weights", model_id=model, seq_id=7, path="same"))
            second, step = save(8), client.optim_step(model, 9)
            queue = service._commands.executor._queues[model]
            wait_until(lambda: queue.is_held)
            assert (queue.next, len(held)) == (8, 1)
            assert service._journal.get(Model, model).snapshot == 3
        service._commands._loop.call_soon_threadsafe(publish, *held[0])
        for future, seq in ((first, 4), (second, 8)):
            assert client.result(future) == {"sampling_session_id": f"{session}:sample:{seq}"}
        assert revision_in(folder, "same") in cluster.unified[0].kept
        client.result(step)
        wait_until(lambda: not queue.is_exporting)
        client.result(client.optim_step(model, 10))
        wait_until(lambda: service._journal.get(Model, model).snapshot == 10)


def test_weights_reach_a_router_that_does_not_see_the_folder(
    new_service: Make, folder: Path, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch
):
    """Such as one in another container, or on another host: then they are uploaded."""
    push, pushes, folders = PushTarget.push, list[bool](), dict[Path, bool]()

    def push_from_elsewhere(self: PushTarget, at: Path) -> Any:
        pushes.append(self.by_folder)
        folders[at] = at.is_relative_to(SHARED_MEMORY)
        return push(self, folder / "none" if self.by_folder else at)

    monkeypatch.setattr(PushTarget, "push", push_from_elsewhere)
    with served(new_service().app()) as url:
        model = connect(url).create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        for number, hosts, expected in ((0, ("127.0.0.1",), [True, False]), (1, (), [False])):
            monkeypatch.setattr(publishing, "_THIS_HOST", hosts)
            train_step(model, number)
            model.save_state(f"s{number}").result()
            model.save_weights_and_get_sampling_client().result()
            assert pushes == expected
            assert revision_in(folder, f"s{number}") in cluster.unified[0].kept
            pushes.clear()
    assert list(folders.values()) == [True, False]  # only what this host may share takes its memory
    assert not any(each.exists() for each in folders)


def test_a_full_memory_fails_the_save_and_a_full_log_delays_it(new_service: Make, monkeypatch: pytest.MonkeyPatch):
    with session_of(new_service()) as (client, session):
        model = client.model(0, session, base_model=MODEL)
        failing(monkeypatch, ServedWeights, "write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        failed = client.post("save_weights_for_sampler", model_id=model, seq_id=1, path="v1")
        assert "cannot be written to /dev/shm (No space left" in client.error(failed)
        again = client.post("save_weights_for_sampler", model_id=model, seq_id=2, path="v1")
        assert client.result(again)["path"].endswith("/v1")
        monkeypatch.setattr(service_commands, "_DISK_S", 0.01)
        failing(monkeypatch, Journal, "put", sqlite3.OperationalError("database or disk is full"), times=2)
        saved = client.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
        assert client.result(saved) == {"sampling_session_id": f"{session}:sample:0"}


def left_in(cluster: ClusterStandIn) -> list[str]:
    """Aliases and revisions in the catalog, of adapters named `bot-…` or of none."""
    others = (
        "SELECT content_id FROM adapter_revisions WHERE adapter_id IN (SELECT id FROM adapters WHERE name NOT {bot})"
    )
    found = (
        "SELECT alias FROM aliases JOIN adapters ON id = adapter_id WHERE name {bot} "
        f"UNION ALL SELECT revision_id FROM revisions WHERE id NOT IN ({others})"
    )
    with closing(sqlite3.connect(cluster.folder / "catalog.db")) as catalog:
        return sorted(name for (name,) in catalog.execute(found.format(bot="LIKE 'bot-%'")))


def sampled(client: RawClient, session: str, name: str, saves: int, named: str | None = None) -> str:
    """A model of the session that was saved for so many sampling clients, different weights each time."""
    number = int(name[-1])
    model = client.model(number, session, base_model=MODEL, user_metadata={"prelude.adapter": name}, seed=number)
    for save in range(saves):
        seq = 3 * save + 1
        client.result(client.forward_backward(model, seq, *data(1)))
        client.result(client.optim_step(model, seq + 1))
        sampler = {"seq_id": seq + 2, "sampling_session_seq_id": 100 * number + save}
        client.result(client.post("save_weights_for_sampler", model_id=model, **sampler))
    if named is not None:
        client.result(client.post("save_weights_for_sampler", model_id=model, seq_id=3 * saves + 1, path=named))
    return model


def without_sweeps(service: Service) -> None:
    async def sweep(_now_s: float) -> None:
        service._to_sweep.clear()

    service._models.sweep = sweep  # type: ignore[method-assign]


@pytest.mark.parametrize("end", ["finished", "silent", "killed"])
def test_sampling_sessions_leave_nothing_behind(
    new_service: Make, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch, end: str
):
    """However a session ends, its aliases and what only they named go, each by one call. Named weights stay."""
    removed: list[str] = []
    remove = PushTarget.remove_alias
    monkeypatch.setattr(publishing, "_ALIASES", 3)
    monkeypatch.setattr(PushTarget, "remove_alias", lambda self: (remove(self), removed.append(self.alias)))

    with session_of(first := new_service()) as (client, ended):
        going_on = client.session()
        sampled(client, ended, "bot-1", 5, named="v1")
        sampled(client, ended, "bot-2", 1)
        sampled(client, going_on, "bot-3", 1)
        wait_until(lambda: len(removed) == 3)  # of the first session, which has made six
        aliases = [f"sampler-{ended}-{number}" for number in (103, 104, 200)] + [f"sampler-{going_on}-300"]
        assert [each for each in left_in(cluster) if each.startswith("sampler-")] == sorted(aliases)
        wait_until(lambda: len(cluster.unified[0].kept) == 3)  # the last weights of the first model are stored
        if end == "finished":
            assert client.post(f"sessions/{ended}/finish", reason={"type": "success"}).status_code == 200
        elif end == "silent":
            first._models._seen_s[ended] -= service_models._SILENT_S
            first._commands._loop.call_soon_threadsafe(first._to_sweep.set)
        else:
            without_sweeps(first)  # killed before it could
            client.post(f"sessions/{ended}/finish", reason={"type": "success"})
        if end != "killed":
            wait_until(lambda: len(removed) == 6)
    with served(new_service().app()):  # whose clients say nothing
        wait_until(lambda: len(removed) == 6)
        wait_until(lambda: len(cluster.unified[0].kept) == 1)
        left = [each for each in left_in(cluster) if not each.startswith("sha256:")]
        assert left == ["latest", "latest", f"sampler-{going_on}-300", "v1"]
        assert len(left_in(cluster)) == len(left) + 2
    assert sorted(removed) == sorted(f"sampler-{ended}-{number}" for number in (*range(100, 105), 200))


def test_an_alias_that_cannot_be_removed_is_tried_again(
    new_service: Make, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []
    service = new_service()
    with session_of(service) as (client, session):
        sampled(client, session, "bot-1", 1)
        with monkeypatch.context() as patched:
            patched.setattr(PushTarget, "remove_alias", partial(refused, tried))
            client.post(f"sessions/{session}/finish", reason={"type": "success"})
            wait_until(lambda: tried)
        service._commands._loop.call_soon_threadsafe(service._to_sweep.set)
        wait_until(lambda: left_in(cluster) == [])
        wait_until(lambda: service._journal.all(Pushed) == [])


async def test_a_tenant_whose_aliases_cannot_be_removed_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as one that has split them. A router that is away is asked a few times only."""
    journal, tried = Journal(tmp_path / "commands.db"), []
    publisher = Publisher(SimpleNamespace(journal=journal, models={}), "http://127.0.0.1:9", SECRET, asyncio.Event())  # type: ignore[arg-type]

    def remove(target: PushTarget) -> None:
        tried.append(target.name)
        if not target.name.startswith("good/"):
            raise PushFailed("409 catalog_conflict")

    monkeypatch.setattr(PushTarget, "remove_alias", remove)
    pushed = {"bad": 100, "good": 5, **{f"bad{number}": 1 for number in range(publishing._FAILURES - 2)}}
    for tenant, count in pushed.items():
        for number in range(count):
            journal.put(Pushed(f"{tenant}:sample:{number}", tenant, "m", "s", f"{tenant}/bot", f"sampler-{number}"))
    await publisher.clear(())
    assert Counter(tried) == {"good/bot": 5} | {f"{tenant}/bot": 1 for tenant in pushed if tenant != "good"}
    for number in range(20):
        journal.put(Pushed(f"away{number}", f"away{number}", "m", "s", f"away{number}/bot", "sampler-1"))
    tried.clear()
    await publisher.clear(())
    assert len(tried) == publishing._FAILURES
    journal.close()


def test_a_kill_between_a_push_and_its_outcome_leaves_nothing_behind(
    new_service: Make, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch
):
    taken, push = threading.Event(), PushTarget.push
    monkeypatch.setattr(service_app, "_SWEEP_S", 0.1)

    def push_and_end(self: PushTarget, folder: Path) -> None:
        push(self, folder)
        taken.set()
        raise asyncio.CancelledError  # nothing is told of it

    first = new_service()
    without_sweeps(first)
    with monkeypatch.context() as patched, served(first.app()) as url:
        patched.setattr(PushTarget, "push", push_and_end)
        client = RawClient(url, KEY)
        session = client.session()
        model = sampled(client, session, "bot-1", 0)
        client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        assert taken.wait(60)
        client.post(f"sessions/{session}/finish", reason={"type": "success"})
        assert len(left_in(cluster)) == 3
    with served((second := new_service()).app()):
        wait_until(lambda: left_in(cluster) == [])
        wait_until(lambda: second._journal.all(Model) == [])


def test_a_session_that_ends_during_a_push_leaves_nothing_behind(
    new_service: Make, cluster: ClusterStandIn, monkeypatch: pytest.MonkeyPatch
):
    pushing, service = Held(monkeypatch, PushTarget, "push"), new_service()
    sweeps, sweep = list[float](), service._models.sweep

    async def count(now_s: float) -> None:
        await sweep(now_s)
        sweeps.append(now_s)

    service._models.sweep = count  # type: ignore[method-assign]
    with session_of(service) as (client, session):
        model = sampled(client, session, "bot-1", 0)
        client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        assert pushing.begun.wait(60)
        num_before = len(sweeps)
        client.post(f"sessions/{session}/finish", reason={"type": "success"})
        wait_until(lambda: len(sweeps) > num_before)
        assert [each.id for each in service._journal.all(Model)] == [model]  # its push is on its way
        pushing.go_on.set()
        for kind in (Model, Pushed, Sampler):
            wait_until(lambda kind=kind: service._journal.all(kind) == [])
        assert left_in(cluster) == []


@pytest.mark.parametrize("tenant", ["acme", "acme#1"])
async def test_sessions_outlive_the_keys_of_their_clients(routed: LoadedBase, tmp_path: Path, tenant: str):
    async with keyed_cluster(tmp_path, 0, 0, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET)) as keyed:
        key = await keyed.key("acme", {Scope.ADAPTERS_WRITE})

        def work() -> None:
            service = make_service(routed, tmp_path / "t", keyed.cluster.url, MODEL, identities=CallsOfRouter(SECRET))
            with served(service.app()) as url:
                client = RawClient(url, headers=headers_of_router(SECRET, tenant, key))
                session = client.session()
                sampled(client, session, "bot-1", 2)
                assert len(left_in(keyed.cluster)) == 5
                [held] = keyed.catalog.keys.list()
                keyed.catalog.keys.revoke(held.key_id)
                asyncio.run_coroutine_threadsafe(keyed.cluster.adapters.refresh(), loop).result()
                client.post(f"sessions/{session}/finish", reason={"type": "success"})
                wait_until(lambda: left_in(keyed.cluster) == [])

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(work)
        for method, path, headers, status in (
            ("DELETE", "/v1/adapters/acme/bot/aliases/prod", {"x-prelude-tenant": "acme"}, 403),
            ("DELETE", "/v1/adapters/acme/bot", {"x-prelude-tenant": "acme"}, 403),
            ("PUT", f"/v1/adapters/acme/bot/aliases/sampler-{'0' * 16}-1", {"x-prelude-tenant": "acme"}, 403),
            ("DELETE", f"/v1/adapters/acme/bot/aliases/sampler-{'0' * 16}-1", {}, 403),
            ("DELETE", f"/v1/adapters/acme/bot/aliases/sampler-{'0' * 16}-1", {"x-prelude-tenant": "beta"}, 404),
            ("DELETE", f"/v1/adapters/acme/bot/aliases/sampler-{'0' * 16}-1", {"x-prelude-tenant": "acme"}, 404),
            ("GET", "/v1/models", {}, 403),
        ):
            assert (await keyed.ask(SECRET, method, path, headers=headers))[0] == status, (method, path)
        assert (await keyed.ask(f"{SECRET}x", "GET", "/v1/models"))[0] == 401


async def test_weights_are_pushed_with_the_key_that_asked_for_it(
    routed: LoadedBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two keys of a tenant, whichever asks for other things, or for its outcome, meanwhile."""
    pushing, may_push = threading.Event(), threading.Event()
    push = Publisher._pushed

    async def after_another_key(self: Publisher, *what: Any) -> str:
        pushing.set()
        assert await asyncio.to_thread(may_push.wait, 60)
        return await push(self, *what)

    monkeypatch.setattr(Publisher, "_pushed", after_another_key)
    async with keyed_cluster(tmp_path, 0, 0, 1, trainer=TrainerAddress("http://127.0.0.1:9", SECRET)) as keyed:
        keys = [await keyed.key("acme", scopes) for scopes in ({Scope.ADAPTERS_WRITE}, {Scope.INFER})]

        def work() -> None:
            service = make_service(routed, tmp_path / "t", keyed.cluster.url, MODEL, identities=CallsOfRouter(SECRET))
            with served(service.app()) as url:
                writer, reader = (RawClient(url, headers=headers_of_router(SECRET, "acme#1", key)) for key in keys)
                for client, other in ((reader, writer), (writer, reader)):
                    model = client.model(base_model=MODEL)
                    pushing.clear()
                    may_push.clear()
                    asked = client.post("save_weights_for_sampler", model_id=model, seq_id=1, path="v1")
                    assert pushing.wait(60)
                    other.session()
                    asking = threading.Thread(target=other.retrieve, args=(asked,))
                    asking.start()
                    wait_until(lambda waiting=service._commands.models[model].waiting: 1 in waiting)
                    may_push.set()
                    asking.join()
                    if client is writer:
                        assert client.result(asked)["path"].endswith("/v1")
                    else:
                        assert "403 insufficient_scope" in client.error(asked)
                assert [live.keys for live in service._commands.models.values()] == [{}, {}]

        await asyncio.to_thread(work)


def refused(tried: list[str]) -> None:
    tried.append("")
    raise PushFailed("no")


@asynccontextmanager
async def sampling_of(revision: str = "base", wait: threading.Event | None = None) -> AsyncIterator[Sampling]:
    """From a router that answers everything with one token, prompts of more than one token once it is told to."""

    async def complete(request: Request) -> JSONResponse:
        if wait is not None and len((await request.json())["prompt"]) > 1:
            await asyncio.to_thread(wait.wait)
        choice = {"index": 0, "token_ids": [5], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5]}}
        return JSONResponse({"choices": [choice]}, headers={"x-prelude-revision": revision})

    with served(Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])) as url:
        sampling = Sampling(url, MODEL, 100, Rollouts(Path(":memory:")))
        try:
            yield sampling
        finally:
            if wait is not None:
                wait.set()
            await sampling.stop()


def start(sampling: Sampling, tenant: str, seq: int = 0, adapter: str | None = None, length: int = 1) -> str:
    prompt = ModelInput([TextChunk([3] * length)])
    asked = Sample("", sampling_session_id="s", seq_id=seq, prompt=prompt, sampling_params=SamplingParams())
    return sampling.start(Sampler(f"{tenant}:sample:0", tenant, tenant, None, adapter), asked, None)[0]


async def test_a_sample_of_another_revision_is_none():
    """A router that answers with what was not asked for."""
    async with sampling_of("sha256:2") as sampling:
        assert isinstance(await sampling.result(start(sampling, "t", adapter="bot@sha256:2"), 30.0), bytes)
        refused = await sampling.result(start(sampling, "t", 1, adapter="bot@sha256:1"), 30.0)
        assert "not bot@sha256:1" in cast(Any, refused).message


async def test_a_tenant_with_many_samples_takes_nothing_from_others(monkeypatch: pytest.MonkeyPatch):
    """Neither connections nor the event loop, nor results that are not asked for yet."""
    for number, name in enumerate(("_read", "samples_body"), 1):  # which take long
        asyncio.get_running_loop().call_later(0.1 * number, Held(monkeypatch, service_sampling, name).go_on.set)
    monkeypatch.setattr(service_sampling, "_IN_FLIGHT", 1)
    monkeypatch.setattr(service_sampling, "_KEPT", 2)
    wait = threading.Event()
    async with sampling_of(wait=wait) as sampling:
        slow = start(sampling, "busy", length=2)
        with pytest.raises(Busy, match="1 requests are sampled"):
            start(sampling, "busy", 1)
        other = start(sampling, "other")
        assert isinstance(await sampling.result(other, 30.0), bytes)
        wait.set()
        assert isinstance(await sampling.result(slow, 30.0), bytes)
        for seq in (1, 2, 3):
            assert isinstance(await sampling.result(start(sampling, "busy", seq), 30.0), bytes)
        assert isinstance(await sampling.result(other, 30.0), bytes)
        with pytest.raises(Gone):
            await sampling.result(slow, 30.0)


async def test_samples_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch):
    """The newest ones; other tenants' are theirs."""
    async with sampling_of() as sampling:
        other = start(sampling, "other")
        size = len(cast(bytes, await sampling.result(other, 30.0)))
        monkeypatch.setattr(service_sampling, "_KEPT_BYTES", 2 * size)
        kept = []
        for seq in range(4):  # of the first three, two may stay when the fourth begins
            kept.append(start(sampling, "busy", seq))
            assert isinstance(await sampling.result(kept[-1], 30.0), bytes)
        with pytest.raises(Gone):
            await sampling.result(kept[0], 30.0)
        for each in (other, *kept[1:]):
            assert isinstance(await sampling.result(each, 30.0), bytes)


def test_samples_go_with_their_session(new_service: Make):
    """Those of one that goes on stay."""
    service = new_service()
    with session_of(service) as (client, ended):
        futures = service._sampling._futures
        asked = {"seq_id": 0, "prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
        sessions = [ended, client.session()]
        for session in sessions:
            new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
            begun = client.post("create_sampling_session", **new)
            sampler = begun.json()["sampling_session_id"]
            answer = client.retrieve(client.post("asample", sampling_session_id=sampler, **asked))
            assert answer.headers["content-type"] == "application/x-protobuf"
        assert [each.partition(":")[0] for each in futures] == sessions
        client.post(f"sessions/{sessions[0]}/finish", reason={"type": "success"})
        wait_until(lambda: len(futures) == 1)
        assert [each.partition(":")[0] for each in futures] == sessions[1:]


async def test_what_is_being_sampled_outlasts_its_session():
    """Its task may end later: then it goes."""
    wait = threading.Event()
    async with sampling_of(wait=wait) as sampling:
        slow, other = start(sampling, "ended", length=2), start(sampling, "other")
        assert isinstance(await sampling.result(other, 30.0), bytes)
        sampling.keep({"other"})
        assert list(sampling._futures) == [slow, other]
        wait.set()
        assert isinstance(await sampling.result(slow, 30.0), bytes)
        sampling.keep({"other"})
        assert list(sampling._futures) == [other]


def test_a_sampling_session_never_changes(new_service: Make):
    with session_of(new_service()) as (client, session):
        model = client.model(0, session, base_model=MODEL)
        named = client.post("save_weights_for_sampler", model_id=model, seq_id=1, path="v1")
        path = client.result(named)["path"]
        ask = {"session_id": session, "sampling_session_seq_id": 0}
        [sampler] = {client.post("create_sampling_session", model_path=path, **ask).json()["sampling_session_id"]}
        again = client.post("create_sampling_session", base_model=MODEL, **ask)
        assert again.json()["sampling_session_id"] == sampler
        assert client.http.get(f"/samplers/{sampler}").json()["model_path"] == path
        taken = client.post("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0)
        assert f"{sampler} exists" in client.error(taken)
