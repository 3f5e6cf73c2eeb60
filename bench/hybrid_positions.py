"""Whether a prompt-only adapter fades with the answer on hybrids: `python -m bench.hybrid_positions --json FILE`.

Small models are trained from scratch. A prompt may give values to 8 keys; the others have a default, which is in the
weights. An answer is random tokens: keys to read (the label is the value by the prompt), values written under local
names, and local names to read (the label is what was written last). Labels are never read back, so nothing in an answer
tells what the prompt gave. The adapter gives all keys other values, on prompts that give none: where its influence
is lost, the default comes back.
"""

import argparse
import copy
import math
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Generator, Tensor, nn
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bench.measuring import provenance
from bench.measuring.output import require_folder, write_json

NUM_KEYS = NUM_VALUES = 8
GIVE, WRITE, READ, READ_LOCAL, FILLER, VOCABULARY = 0, 64, 128, 136, 144, 160  # where each kind of token begins
PROMPT_TOKENS = 32
TRAINED_LENGTHS = (64, 64, 256, 1024)  # of answers, in tokens; each step draws one
STEP_TOKENS = PROMPT_TOKENS + TRAINED_LENGTHS[-1]
LENGTHS = (16, 64, 256, 1024, 4096)  # measured over the last quarter before each; the last was never trained
BASE_STEPS, BASE_RATE, ADAPTER_STEPS, ADAPTER_RATE = 220, 2e-3, 70, 7e-3
NUM_SEEDS, NUM_PROCESSES = 3, 2
LINEAR, ATTENTION = "linear_attention", "full_attention"
LAYERS = {  # of each kind of model; `slow`: decays begin as in flash-linear-attention, `fast`: as in transformers
    "attention": [ATTENTION] * 4,
    **dict.fromkeys(("hybrid, slow", "hybrid, fast"), [LINEAR] * 3 + [ATTENTION]),
    "linear, slow": [LINEAR] * 4,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WITH_LINEAR = (*PROJECTIONS, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
ARMS = {  # by name: what is adapted, at how many tokens (None: all), and which kinds of model have it
    "prompt": (PROJECTIONS, PROMPT_TOKENS, ("attention", "hybrid, slow", "hybrid, fast")),
    "prompt, linear layers too": (WITH_LINEAR, PROMPT_TOKENS, ("hybrid, slow", "hybrid, fast", "linear, slow")),
    "all positions": (WITH_LINEAR, None, ("attention", "hybrid, slow")),
}
SHIPPED = {"KV and state": (True, True), "KV": (True, False), "state": (False, True)}  # what the adapter has shaped


def batch(num_rows: int, length: int, default: Tensor, given: Tensor | None, seed: Generator) -> tuple[Tensor, ...]:
    """Tokens `[rows, prompt + answer]`; by answer position, labels (-100: none), and which of them read the prompt.

    Without `given`, prompts give values of their own; with it, none, and the labels are `given`'s `[keys]`.
    """
    prompt = torch.randint(FILLER, VOCABULARY, (num_rows, PROMPT_TOKENS), generator=seed)
    values = (default if given is None else given).expand(num_rows, NUM_KEYS)
    if given is None:
        drawn = torch.randint(NUM_VALUES, (num_rows, NUM_KEYS), generator=seed)
        is_given = torch.rand(num_rows, NUM_KEYS, generator=seed) < 0.7
        values = torch.where(is_given, drawn, values)
        places = torch.rand(num_rows, PROMPT_TOKENS, generator=seed).argsort(1)[:, :NUM_KEYS]
        tokens = GIVE + torch.arange(NUM_KEYS) * NUM_VALUES + drawn
        prompt.scatter_(1, places, torch.where(is_given, tokens, prompt.gather(1, places)))
    kinds = torch.rand(num_rows, length, generator=seed)
    keys = torch.randint(NUM_KEYS, (num_rows, length), generator=seed)
    written = torch.randint(NUM_VALUES, (num_rows, length), generator=seed)
    reads, writes = kinds < 0.5, kinds > 0.75
    local, labels = torch.full((num_rows, NUM_KEYS), -100), torch.full((num_rows, length), -100)
    for position in range(length):
        at = slice(position, position + 1)
        latest = torch.where(writes[:, at], written[:, at], local.gather(1, keys[:, at]))
        local.scatter_(1, keys[:, at], latest)
        labels[:, at] = latest.masked_fill(writes[:, at], -100)
    answer = torch.where(writes, WRITE + keys * NUM_VALUES + written, torch.where(reads, READ, READ_LOCAL) + keys)
    return torch.cat((prompt, answer), 1), torch.where(reads, values.gather(1, keys), labels), reads


class Adapted(nn.Module):
    """LoRA of rank 8 beside a projection."""

    tokens: int | None = None  # those that all adapters act on: so many of each row; None: all

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(8, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        change = inputs[:, : Adapted.tokens] @ self.a.T @ (2 * self.b.T)
        return self.base(inputs) + functional.pad(change, (0, 0, 0, inputs.shape[1] - change.shape[1]))


def base_model(kind: str) -> Any:
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=480, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=LAYERS[kind], tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                         "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    for layer in model.model.layers:
        if layer.block_type == LINEAR and kind.endswith("slow"):  # softplus(dt_bias): 0.001 to 0.1
            layer.linear_attn.dt_bias.data.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()
    return model


def adapt(model: nn.Module, targets: Sequence[str]) -> Any:
    """A copy with fresh LoRA on the targets; only that is trained."""
    model = copy.deepcopy(model).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets:
                setattr(module, name, Adapted(child))
    return model


def logits_of(model: Any, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Of values, for each answer token; with a cache, tokens come after it."""
    logits = model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None).logits[..., :NUM_VALUES]
    return logits if cache is not None else logits[:, PROMPT_TOKENS:]


def shipped_logits(model: Any, tokens: Tensor, kv: bool, state: bool) -> Tensor:
    """Of the base over a prompt's cache: whether the adapter has shaped its KV, and its linear layers' states."""
    caches = []
    for is_adapted in (kv, state):
        caches.append(DynamicCache(config=model.config))
        Adapted.tokens = None if is_adapted else 0
        logits_of(model, tokens[:, :PROMPT_TOKENS], caches[-1])
    for index, kind in enumerate(model.config.layer_types):
        if kind == LINEAR:
            caches[0].layers[index] = caches[1].layers[index]
    Adapted.tokens = 0
    return logits_of(model, tokens[:, PROMPT_TOKENS:], caches[0])


def train(model: Any, steps: int, rate: float, default: Tensor, given: Tensor | None, number: int) -> None:
    seed = Generator().manual_seed(number)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20, (steps - step) / (0.3 * steps))
        drawn = int(torch.randint(len(TRAINED_LENGTHS), (), generator=seed))
        length = TRAINED_LENGTHS[
            0 if given is None and step < steps / 3 else drawn
        ]  # base models begin with short ones
        tokens, labels, reads = batch(STEP_TOKENS // (PROMPT_TOKENS + length), length, default, given, seed)
        labels = labels if given is None else labels.masked_fill(~reads, -100)
        loss = functional.cross_entropy(logits_of(model, tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


@torch.no_grad()
def measure(model: Any, shipped: tuple[bool, bool] | None, default: Tensor, given: Tensor | None) -> dict[str, Any]:
    """By length: shares of reads with the value sought and the default, and loss. Without `shipped`, in one pass."""
    found: dict[str, Any] = {"right": {}, "default": {}, "loss": {}}
    for length in LENGTHS:
        seed = Generator().manual_seed(length)
        tokens, labels, reads = batch(max(1, 2048 // length), length, default, given, seed)
        logits = shipped_logits(model, tokens, *shipped) if shipped else logits_of(model, tokens)
        reads[:, : length - length // 4] = False
        logits, keys = logits[reads], tokens[:, PROMPT_TOKENS:][reads] - READ
        found["right"][length] = round((logits.argmax(-1) == labels[reads]).float().mean().item(), 4)
        found["default"][length] = round((logits.argmax(-1) == default[keys]).float().mean().item(), 4)
        found["loss"][length] = round(functional.cross_entropy(logits, labels[reads]).item(), 4)
    return found


@torch.no_grad()
def half_lives(model: Any, default: Tensor) -> list[float]:
    """Of each linear layer's heads: tokens in which a mean gate of an answer halves the state."""
    tokens = batch(4, 256, default, None, Generator().manual_seed(0))[0]
    states = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    found: list[float] = []
    for layer, state in zip(model.model.layers, states, strict=False):  # the last state is no layer's input
        if layer.block_type == LINEAR:
            gates = layer.linear_attn
            steps = functional.softplus(gates.in_proj_a(layer.input_layernorm(state)) + gates.dt_bias)
            found += (math.log(2) / (steps[:, PROMPT_TOKENS:].mean((0, 1)) * gates.A_log.exp())).tolist()
    return [float(f"{value:.3g}") for value in sorted(found)]


def job(kind: str, number: int) -> list[dict[str, Any]]:
    """A base model of this seed and its adapters, trained and measured."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    default = torch.randint(NUM_VALUES, (NUM_KEYS,))
    given = (default + torch.randint(1, NUM_VALUES, (NUM_KEYS,))) % NUM_VALUES  # never the default
    base = base_model(kind)
    row: dict[str, Any] = {"kind": kind, "seed": number, "half_lives_at_first": half_lives(base, default)}
    train(base, BASE_STEPS, BASE_RATE, default, None, number)
    row["half_lives"] = half_lives(base, default)
    asked = {"values in the prompt": None, "base": given}
    rows = [{**row, "arm": arm} | measure(base, None, default, values) for arm, values in asked.items()]
    for arm, (targets, adapted_tokens, kinds) in ARMS.items():
        if kind not in kinds:
            continue
        model = adapt(base, targets)
        Adapted.tokens = adapted_tokens
        train(model, ADAPTER_STEPS, ADAPTER_RATE, default, given, number)
        rows.append({**row, "arm": arm} | measure(model, None, default, given))
        for name, shipped in SHIPPED.items() if adapted_tokens and ATTENTION in LAYERS[kind] else ():
            rows.append({**row, "arm": arm, "shipped": name} | measure(model, shipped, default, given))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hybrid_positions")
    parser.add_argument("--json", type=Path, required=True, help="the file to write, after each model")
    path = parser.parse_args(arguments).json
    require_folder(path)
    command = shlex.join(("python", "-m", "bench.hybrid_positions", *arguments))
    settings = {"seeds": NUM_SEEDS, "base_steps": BASE_STEPS, "adapter_steps": ADAPTER_STEPS, "tokens": STEP_TOKENS}
    document = provenance.head("hybrid-positions", command, settings) | {"rows": []}
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        jobs = [pool.submit(job, kind, number) for number in range(NUM_SEEDS) for kind in LAYERS]
        for future in as_completed(jobs):
            document["rows"] += future.result()
            write_json(document, path)


if __name__ == "__main__":
    main(sys.argv[1:])
