"""The Tinker SDK trains through the router of `prelude up`, and a pair samples: what is served is what was trained."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from support.clusters.running_cluster import running_cluster
from support.training.trainer import sequence, weights
from tinker import types

from process.free_ports import bound_socket

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TOLERANCE = 1e-3  # of the mean ratio of policy to sampler; float32 in other kernels differs by 1e-5
NUM_SAMPLES, NEW_TOKENS = 4, 12


def sft_datum(number: int) -> types.Datum:
    tokens = sequence(number)
    inputs: Any = {"target_tokens": tokens[1:], "weights": weights()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rollout(prompt: list[int], sample: Any) -> types.Datum:
    """With an advantage of 1 for each token: then the loss is the negative sum of ratios."""
    length, context = len(sample.tokens), len(prompt) - 1
    inputs: Any = {
        "target_tokens": [*prompt, *sample.tokens][1:],
        "logprobs": [0.0] * context + list(sample.logprobs),
        "advantages": [0.0] * context + [1.0] * length,
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints([*prompt, *sample.tokens[:-1]]), loss_fn_inputs=inputs)
    sampled = types.SampledProvenanceSpan(sequence_id=sample.sequence_id, length=length)
    asked = types.PromptProvenanceSpan(sequence_id=sample.sequence_id, length=context)
    whole = types.PromptProvenanceSpan(sequence_id=sample.sequence_id, length=context + length)
    return datum.with_provenance(model_input=[whole], loss_fn_inputs=[asked, sampled])


def test_samples_of_a_pair_have_ratios_of_one(model_dir: Path, tmp_path: Path):
    router = {"port": 0, "management": True}
    with bound_socket() as listener:
        trainer = {"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "folder": str(tmp_path / "trainer")}
    store = {"url": f"file://{tmp_path}/store"}
    with running_cluster(tmp_path, model_dir, {}, router=router, store=store, trainer=trainer) as cluster:
        service = tinker.ServiceClient(base_url=cluster.url, api_key="tml-default")
        models = {
            kind: service.create_lora_training_client(
                base_model="demo", rank=rank, seed=1, user_metadata={"prelude.kind": kind, "prelude.adapter": kind}
            ).result()
            for kind, rank in (("lora", 8), ("direft", 4), ("loreft", 2))
        }
        params = types.SamplingParams(max_tokens=NEW_TOKENS, seed=5, stop=[])
        prompt, revisions = sequence(20), set()
        untrained = models["lora"].save_weights_and_get_sampling_client().result()
        scored = untrained.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
        expected = models["lora"].forward([sft_datum(20)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        first = weights().index(1)
        assert scored[0] is None
        assert scored[first + 1 :] == pytest.approx(expected[first:], abs=TOLERANCE)
        for step in range(3):
            for model in models.values():
                model.forward_backward([sft_datum(8 * step + number) for number in range(8)], "cross_entropy")
                model.optim_step(types.AdamParams(learning_rate=0.05)).result()
                sampler = model.save_weights_and_get_sampling_client().result()
                samples = sampler.sample(types.ModelInput.from_ints(prompt), NUM_SAMPLES, params).result().sequences
                assert [len(sample.tokens) for sample in samples] == [NEW_TOKENS] * NUM_SAMPLES
                [revision] = {sample.sequence_id.partition("@")[2] for sample in samples}
                revisions.add(revision)
                data = [rollout(prompt, sample) for sample in samples]
                ratios = -model.forward(data, "importance_sampling").result().metrics["loss:sum"]
                assert ratios / (NUM_SAMPLES * NEW_TOKENS) == pytest.approx(1, abs=TOLERANCE)
                model.forward_backward(data, "importance_sampling")
        assert len(revisions) == 9
        for kind, model in models.items():
            path = model.save_weights_for_sampler("final").result().path
            named = service.create_sampling_client(model_path=path).result()
            assert named.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens
            found = httpx.get(f"{cluster.url}/v1/adapters/{kind}").json()
            assert all(each["kinds"] == ["lora" if kind == "lora" else "reft"] for each in found["revisions"]), found
            assert found["revisions"]
        service.close("success").result()
