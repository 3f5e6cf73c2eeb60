"""Packed rows of trees against one-by-one plain computation, in float64."""

import copy
import itertools
from typing import Any

import pytest
import torch
from support.training.random_documents import random_documents
from support.training.training_models import FAMILIES, make_tiny, plain_logprobs, scramble

from training.adapted_model import AdaptedModel
from training.errors import AdapterUntrainable, DocumentInvalid
from training.losses import dpo, sft
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import KINDS, AdapterSpec
from training.tree.documents import Branch, Document, merge
from training.tree.packing import pack
from training.tree.rows import Row

TOLERANCE = 1e-10

# A conversation of three trained turns, a pair, and two answers to one prompt.
TURNS = merge(
    [
        Document((5, 9, 7), (Branch(3, (11, 12), 0),)),
        Document((5, 9, 7, 11, 12, 3, 4), (Branch(7, (21, 22, 23), 0),)),
        Document((5, 9, 7, 11, 12, 3, 4, 21, 22, 23, 8), (Branch(11, (31,), 0),)),
    ]
)
PAIRS = [Document((40, 41, 42), (Branch(3, (50, 51), 1), Branch(3, (60, 61, 62), 1, is_chosen=False)))]
GROUP = [Document((70, 71), (Branch(2, (80, 81, 82, 83), 2), Branch(2, (90,), 3)))]
DOCUMENTS = [*TURNS, *PAIRS, *GROUP]


def make_adapter(kind: str, base: Any, **options: Any) -> TrainableAdapter:
    spec = AdapterSpec(kind, **{"rank": 3, "alpha": 6.0, **options})  # type: ignore[arg-type]
    return TrainableAdapter.create(spec, base, seed=1, dtype=torch.float64)


def answer_scores(adapted: AdaptedModel, row: Row) -> list[tuple[Branch, torch.Tensor]]:
    return list(zip(row.answers, adapted.score(row).of_answers(row), strict=True))


def weighted(parts: list[torch.Tensor]) -> torch.Tensor:
    """A sum in which no two tokens count the same, so that a mixed-up order is seen."""
    values = torch.cat(parts)
    return -(values * (1 + 0.01 * torch.arange(len(values), dtype=values.dtype))).sum()


def gradients(adapter: TrainableAdapter) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in adapter.named_parameters() if parameter.grad is not None}


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= tolerance, name


@pytest.mark.parametrize(
    ("family", "positions", "checkpointing"),
    [
        *itertools.product(["llama"], ["prefill", "all"], [False, True]),
        *((family, "prefill", True) for family in FAMILIES if family != "llama"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_its_examples_one_by_one(tiny, family: str, kind: str, positions: Any, checkpointing: bool):
    model, base = tiny(family)
    adapter = scramble(make_adapter(kind, base, positions=positions))
    plain = copy.deepcopy(adapter)
    expected = [
        plain_logprobs(model, plain, document.trunk[: branch.position], branch.tokens, positions == "all")
        for document in DOCUMENTS
        for branch in document.branches
    ]
    weighted(expected).backward()
    assert len(gradients(plain)) == len(list(plain.parameters()))  # nothing is left out

    with AdaptedModel(model, adapter, checkpointing=checkpointing) as adapted:
        [row] = pack(DOCUMENTS[::-1], 128)
        order = [row.answers.index(branch) for document in DOCUMENTS for branch in document.branches]
        scores = adapted.score(row)
        assert scores.logprobs.dtype == torch.float64
        answers = scores.logprobs.split([len(branch.tokens) for branch in row.answers])
        found = [answers[number] for number in order]
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= TOLERANCE
        weighted(found).backward()
        assert_same(gradients(adapter), gradients(plain))
    without = [
        plain_logprobs(model, None, document.trunk[: branch.position], branch.tokens, False)
        for document in DOCUMENTS
        for branch in document.branches
    ]
    assert (torch.cat(without) - torch.cat(expected)).abs().max() > 0.01  # the adapter matters


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"kind": "lora", "modules": ("q_proj", "down_proj"), "layers": (0, 2)}, {"kind": "loreft", "layers": (1,)}],
    ids=str,
)
def test_rows_are_read_before_one_backward_pass(tiny, options: dict[str, Any], checkpointing: bool):
    """Of an adapter on some layers. A layer that is computed again finds the tokens of its own row."""
    model, base = tiny("llama")
    adapter = scramble(make_adapter(base=base, **options))
    plain = copy.deepcopy(adapter)
    documents = random_documents(7, 24, vocabulary=150)
    terms = [
        (1 + branch.example)
        * plain_logprobs(model, plain, document.trunk[: branch.position], branch.tokens, False).sum()
        for document in documents
        for branch in document.branches
    ]
    torch.stack(terms).sum().backward()
    with AdaptedModel(model, adapter, checkpointing=checkpointing) as adapted:
        rows = pack(documents, 256)
        assert len(rows) > 1
        found = [(1 + branch.example) * score for row in rows for branch, score in answer_scores(adapted, row)]
        torch.stack(found).sum().backward()
    assert sorted(each.item() for each in found) == pytest.approx(sorted(each.item() for each in terms))
    for name, gradient in gradients(plain).items():
        difference = gradients(adapter)[name] - gradient
        assert difference.abs().max() <= TOLERANCE * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_adapter_leaves_scores_bitwise_unchanged(tiny, kind: Any, dtype: torch.dtype):
    model, base = tiny("qwen3", dtype)
    row = Row.of(DOCUMENTS)
    for rank in (1, 4, 31):
        adapter = TrainableAdapter.create(AdapterSpec(kind, rank=rank, positions="all"), base, seed=rank)
        with AdaptedModel(model, adapter) as adapted, torch.no_grad():
            of_base = adapted.score_base(row).logprobs
            assert torch.equal(adapted.score(row).logprobs, of_base)
            scramble(adapter)
            assert not torch.equal(adapted.score(row).logprobs, of_base)


def test_dpo_reads_its_reference_from_the_same_model(tiny):
    """The reference of a pair is the base model, from the same row; gradients against one-by-one computation."""
    model, base = tiny("qwen2")
    adapter = scramble(make_adapter("direft", base))
    plain = copy.deepcopy(adapter)
    documents = [*PAIRS, Document((7, 8), (Branch(2, (9, 10), 5), Branch(2, (11,), 5, is_chosen=False)))]
    terms = []
    for document in documents:
        good, bad = (
            (
                plain_logprobs(model, plain, document.trunk, branch.tokens, False).sum()
                - plain_logprobs(model, None, document.trunk, branch.tokens, False).sum().detach()
            )
            for branch in document.branches
        )
        terms.append(-torch.log(torch.sigmoid(0.3 * (good - bad))))
    expected = torch.stack(terms).sum()
    expected.backward()
    with AdaptedModel(model, adapter, checkpointing=True) as adapted:
        [row] = pack(documents, 128)
        with torch.no_grad():
            reference = adapted.score_base(row)
        loss = dpo(adapted.score(row), reference, row, beta=0.3)
        loss.total.backward()
    assert loss.weight == 2
    assert abs(loss.total - expected) <= TOLERANCE
    assert_same(gradients(adapter), gradients(plain))


def test_logits_and_scores_agree(tiny):
    model, base = tiny("llama")
    with AdaptedModel(model, scramble(make_adapter("lora", base))) as adapted:
        row = Row.of(DOCUMENTS)
        logits, scores = model.get_output_embeddings()(adapted.hidden(row)), adapted.score(row)
    expected = logits[row.predictors].log_softmax(dim=1).gather(1, row.target_tokens[:, None]).squeeze(1)
    assert (expected - scores.logprobs).abs().max() <= TOLERANCE
    assert torch.equal(scores.correct, logits[row.predictors].argmax(dim=1) == row.target_tokens)
    loss = sft(scores, row)
    assert loss.weight == row.num_targets == 16
    assert abs(loss.total + expected.sum()) <= 16 * TOLERANCE


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_is_left_as_it_was(tiny, checkpointing: bool):
    model, base = tiny("llama", torch.float32)
    model.train()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    before = model(input_ids=tokens, attention_mask=mask).logits
    names = [name for name, _ in model.named_modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with AdaptedModel(model, scramble(make_adapter("lora", base)), checkpointing=checkpointing) as adapted:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        adapted.score(Row.of(DOCUMENTS)).logprobs.sum().backward()
        assert all(parameter.grad is not None for parameter in adapted.adapter.parameters())
        assert [name for name, _ in model.named_modules()] == names
        # Used directly, the model is the base model, also with masks that are not a row's.
        assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, before)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.eval()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("lora", {"modules": ("lm_head",)}, "'lm_head' would not be served; q_proj"),
        ("lora", {"modules": ("embed_tokens",)}, "'embed_tokens' would not be served"),
        ("lora", {"modules": ()}, "no module"),
        ("lora", {"layers": (3,)}, "layer 3 .*0 to 2"),
        ("direft", {"layers": ()}, "no layer"),
        ("direft", {"modules": ("q_proj",)}, "modules are for lora"),
        ("direft", {"rank": 32}, "the rank is 32; it must be below"),
        ("loreft", {"rank": 0}, "at least 1"),
        ("dora", {}, "'dora'; lora, direft, loreft"),
        ("lora", {"alpha": float("nan")}, "must be finite"),
        ("lora", {"positions": "some"}, "'some'"),
    ],
)
def test_what_cannot_be_trained_is_refused(tiny, kind: str, options: dict[str, Any], message: str):
    _, base = tiny("llama")
    with pytest.raises(AdapterUntrainable, match=message):
        make_adapter(kind, base, **options)


def test_lora_on_experts_is_refused_and_on_attention_trained(tmp_path):
    model, base = make_tiny(
        "qwen3_moe", tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    )
    with pytest.raises(AdapterUntrainable, match=r"'up_proj' of a mixture of experts.*q_proj, k_proj, v_proj, o_proj"):
        make_adapter("lora", base, modules=("q_proj", "up_proj"))
    adapter = make_adapter("lora", base)
    assert {module for _, module, _ in adapter.lora()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = copy.deepcopy(scramble(adapter))
    with AdaptedModel(model, adapter, checkpointing=True) as adapted:
        adapted.score(Row.of(PAIRS)).logprobs.sum().backward()
    [document] = PAIRS
    sum(
        plain_logprobs(model, plain, document.trunk, branch.tokens, False).sum() for branch in document.branches
    ).backward()
    assert_same(gradients(adapter), gradients(plain), 1e-7)  # the router's softmax is in float32


def test_an_adapter_for_another_model_is_refused(tiny, tmp_path):
    model, _ = tiny("llama")
    for number, (kind, fields) in enumerate(
        itertools.product(("lora", "direft"), ({"hidden_size": 64}, {"num_hidden_layers": 4}))
    ):
        _, other = make_tiny("llama", tmp_path / str(number), **fields)
        with pytest.raises(AdapterUntrainable, match="another model"):
            AdaptedModel(model, make_adapter(kind, other))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_contexts_beyond_a_sliding_window_are_refused(tmp_path):
    model, base = make_tiny("mistral", tmp_path, sliding_window=12)
    with AdaptedModel(model, make_adapter("direft", base)) as adapted:
        with pytest.raises(DocumentInvalid, match="context of 13 tokens, but the model attends to 12"):
            adapted.hidden(Row.of([Document((1,) * 11, (Branch(11, (2, 3)),))]))
        adapted.hidden(Row.of([Document((1,) * 11, (Branch(11, (2,)),))] * 3))
