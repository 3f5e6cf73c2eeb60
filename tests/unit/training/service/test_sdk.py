"""The unmodified Tinker SDK trains: SFT, custom losses, policy losses, checkpoints, several models and tenants."""

from collections.abc import Iterator
from typing import Any

import pytest
import tinker
import torch
from support.training.trainer import sequence, weights
from tinker import types

from training.service import app as service_app

pytestmark = pytest.mark.slow

ADAM = types.AdamParams(learning_rate=0.05)


@pytest.fixture
def connect(url: str) -> Iterator[Any]:
    """connect(tenant): a ServiceClient."""
    opened = []

    def connected(tenant: str = "sdk") -> tinker.ServiceClient:
        opened.append(tinker.ServiceClient(base_url=url, api_key=f"tml-{tenant}"))
        return opened[-1]

    yield connected
    for client in opened:
        client.close("success").result()


def make_datum(number: int, **inputs: Any) -> types.Datum:
    tokens = sequence(number)
    given = inputs or {"weights": weights()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **given}
    )


def train(model: Any, num_steps: int, first: int = 0, count: int = 4) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; passes and steps are submitted before anything is waited for."""
    futures = []
    for step in range(first, first + num_steps):
        data = [make_datum(count * (step % 2) + number) for number in range(count)]
        futures.append((model.forward_backward(data, "cross_entropy"), model.optim_step(ADAM)))
    return [(one.result().metrics["loss:sum"], two.result().metrics["grad_norm"]) for one, two in futures]


def test_sft_learns(connect: Any):
    service = connect()
    model = service.create_lora_training_client(base_model="demo", rank=8, seed=3).result()
    assert (model.get_info().model_data.model_name, model.get_info().lora_rank) == ("demo", 8)
    losses = [loss for loss, _ in train(model, 24)]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.1 * 4 * 4 * sum(weights())  # 0.1 for each token of 4 steps
    output = model.forward([make_datum(0)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-sum(output.loss_fn_outputs[0]["logprobs"].data), rel=1e-6)


def test_chunks_that_arrive_in_another_order_are_one_batch(connect: Any, monkeypatch: pytest.MonkeyPatch):
    losses = []
    for datums in (64, 2):  # the SDK sends the first of several chunks last
        monkeypatch.setattr(service_app, "_DATUMS", datums)
        model = connect().create_lora_training_client(base_model="demo", rank=4, seed=3).result()
        losses.append([loss for loss, _ in train(model, 3, count=7)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_resumed_run_goes_on_bit_by_bit(connect: Any):
    service = connect("saver")
    model = service.create_lora_training_client(base_model="demo", rank=4, seed=5).result()
    train(model, 3)
    path = model.save_state("three").result().path
    expected = train(model, 4, first=3)
    other = connect("saver")
    resumed = other.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 4
    assert train(resumed, 4, first=3) == expected
    cold = other.create_training_client_from_state(path).result()  # without moments: another second step
    begun = train(cold, 4, first=3)
    assert begun[0] == expected[0]
    assert begun[2:] != expected[2:]
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name"):
        model.save_state("three").result()
    assert model.save_state("three", overwrite=True).result().path == path
    with pytest.raises(tinker.NotFoundError, match="there is no"):
        connect("stranger").create_training_client_from_state(path).result()
    rest = tinker.RestClient(base_url=str(service.holder._base_url), api_key="tml-saver")
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(path).result()


@pytest.mark.parametrize("kind", ["direft", "loreft"])
def test_reft_learns_beside_lora_and_goes_on_bit_by_bit(connect: Any, kind: str):
    service = connect(kind)
    metadata = {"prelude.kind": kind}
    model = service.create_lora_training_client(base_model="demo", rank=4, seed=5, user_metadata=metadata).result()
    lora = service.create_lora_training_client(base_model="demo", rank=8, seed=5).result()
    assert [(each.get_info().is_lora, each.get_info().lora_rank) for each in (model, lora)] == [(False, 4), (True, 8)]
    begun, other = train(model, 3), train(lora, 3)
    assert begun[0][0] == pytest.approx(other[0][0], rel=1e-6)  # neither changes anything at first
    assert begun[2][0] < begun[0][0]
    path = model.save_state("three").result().path
    expected = train(model, 4, first=3)
    resumed = service.create_training_client_from_state_with_optimizer(path, user_metadata=metadata).result()
    assert train(resumed, 4, first=3) == expected
    fresh = service.create_lora_training_client(base_model="demo", rank=4, seed=6, user_metadata=metadata).result()
    fresh.load_state_with_optimizer(path).result()  # of another seed
    assert train(fresh, 4, first=3) == expected
    with pytest.raises(tinker.BadRequestError, match=f"prelude.kind is 'lora', of the checkpoint '{kind}'"):
        service.create_training_client_from_state(path, user_metadata={"prelude.kind": "lora"}).result()
    with pytest.raises(tinker.RequestFailedError, match=f"kind of the checkpoint is {kind}, of .* lora"):
        lora.load_state(path).result()
    decayed = model.optim_step(types.AdamParams(learning_rate=0.05, weight_decay=0.1))
    if kind == "direft":
        decayed.result()
    else:
        with pytest.raises(tinker.RequestFailedError, match="loreft has none"):
            decayed.result()


def test_a_custom_loss_is_the_one_it_is(connect: Any):
    """Its gradient comes back as weights, and the answers are those of its forward pass."""
    service = connect()
    norms = []
    for is_custom in (False, True):
        model = service.create_lora_training_client(base_model="demo", rank=4, seed=3).result()
        data = [make_datum(1), make_datum(2)]
        if is_custom:

            def loss(data: Any, logprobs: Any) -> Any:
                halves = [0.5 * (torch.tensor(weights()) * each).sum() for each in logprobs]
                return -sum(halves), {"mine": 1.0}

            result = model.forward_backward_custom(data, loss).result()
            assert result.metrics["mine"] == 1.0
        else:
            data = [
                make_datum(
                    n,
                    weights=[0.5 * w for w in weights()],
                    answer=types.TensorData(data=weights(), dtype="float32", shape=[11]),
                )
                for n in (1, 2)
            ]
            result = model.forward_backward(data, "cross_entropy").result()
        norms.append((result.metrics["loss:sum"], model.optim_step(ADAM).result().metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_policy_losses_begin_with_ratios_of_one(connect: Any, loss: str):
    model = connect().create_lora_training_client(base_model="demo", rank=4, seed=3).result()
    scored = model.forward([make_datum(1)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    advantages = [0.5 * weight for weight in weights()]
    datum = make_datum(1, logprobs=list(scored), advantages=advantages)
    spans = [
        types.PromptProvenanceSpan(sequence_id="s", length=5),
        types.SampledProvenanceSpan(sequence_id="s", length=6),
    ]
    datum = datum.with_provenance(
        model_input=[types.PromptProvenanceSpan(sequence_id="s", length=11)], loss_fn_inputs=spans
    )
    total = model.forward_backward([datum], loss).result().metrics["loss:sum"]
    expected = {"cispo": -sum(a * q for a, q in zip(advantages, scored, strict=True))}.get(loss, -3.0)
    assert total == pytest.approx(expected, rel=1e-6)
    assert model.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_capabilities_name_the_model(connect: Any, url: str):
    [model] = tinker.RestClient(base_url=url, api_key="tml-sdk").get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == ("demo", 256, True, True)
    with pytest.raises(tinker.BadRequestError, match="'demo' is served here"):
        connect().create_lora_training_client(base_model="llama", rank=4).result()
