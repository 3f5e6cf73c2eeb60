"""`positions: all` against peft's own LoRA layers."""

from __future__ import annotations

import pytest
import torch
from support.training.random_documents import random_documents
from support.training.training_models import scramble

from adapters.model.base_model import MODULES, name_of_module
from training.adapted_model import attach
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec
from training.tree.documents import Document
from training.tree.packing import pack


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_for_all_positions_is_peft(tiny, checkpointing: bool):
    from peft import LoraConfig, get_peft_model

    model, base = tiny("llama")
    spec = AdapterSpec("lora", rank=3, positions="all")
    adapter = scramble(TrainableAdapter.create(spec, base, dtype=torch.float64))
    documents = [
        Document(each.trunk, each.branches, positions="all") for each in random_documents(11, 10, vocabulary=150)
    ]
    rows = pack(documents, 256)
    adapted = attach(model, [adapter], checkpointing=checkpointing)
    try:
        total = sum(((1 + row.targets) * adapted.score(row).logprobs).sum() for row in rows)
        torch.as_tensor(total).backward()
    finally:
        adapted.detach()

    # peft sees every answer behind its context, as a sequence of its own.
    place = {
        branch: [int(each) for each in row.targets[row.target_branches == number]]
        for row in rows
        for number, branch in enumerate(row.answers)
    }
    config = LoraConfig(r=3, lora_alpha=32, target_modules=list(MODULES), lora_dropout=0.0)
    theirs = get_peft_model(model, config)
    try:
        layers = {
            (layer, module): theirs.get_submodule(f"base_model.model.{name_of_module(layer, module)}")
            for layer, module, _ in adapter.lora()
        }
        for layer, module, factors in adapter.lora():
            layers[layer, module].lora_A["default"].weight.data = factors.a.detach().clone()
            layers[layer, module].lora_B["default"].weight.data = factors.b.detach().clone()
        expected = torch.zeros((), dtype=torch.float64)
        for document in documents:
            for branch in document.branches:
                tokens = torch.tensor([[*document.trunk[: branch.position], *branch.tokens]])
                logprobs = theirs(input_ids=tokens).logits[0, branch.position - 1 : -1].log_softmax(dim=1)
                chosen = logprobs.gather(1, tokens[0, branch.position :, None]).squeeze(1)
                expected = expected + ((1 + torch.tensor(place[branch])) * chosen).sum()
        expected.backward()
        assert abs(float(expected) - float(total)) <= 1e-10 * abs(float(expected))
        for layer, module, factors in adapter.lora():
            for own, other in ((factors.a, "lora_A"), (factors.b, "lora_B")):
                gradient = getattr(layers[layer, module], other)["default"].weight.grad
                assert (own.grad - gradient).abs().max() <= 1e-10 * max(1.0, float(gradient.abs().max()))
    finally:
        theirs.unload()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
