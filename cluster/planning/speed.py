"""How long a GPU takes for prompts and for decode steps: a roofline with measured shares of the peaks.

docs/capacity.md states the formulas. Times are in seconds, sizes in bytes.
"""

import functools
from dataclasses import dataclass

from adapters.model.footprint import ITEM_BYTES
from cluster.local.memory_plan import ModelSizes, layer_weights
from cluster.planning.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What is counted on of a GPU's peaks, and what comes on top.

    Measured on H200 and H100 (bfloat16, SGLang 0.5.17), but `collective_s`, which is assumed: docs/capacity.md;
    `tests/unit/cluster/planning/test_planning_measured.py` compares them with bench/results.
    """

    compute_share: float = 0.56  # of the peak, while prompts are read
    bandwidth_share: float = 0.78  # of the peak, while weights and KV are read
    step_s: float = 0.75e-3  # of every batch, whatever is in it: launches, sampling, the scheduler
    sequence_s: float = 8e-6  # of every sequence in a decode step: its page table, its token
    prompt_s: float = 0.18e-3  # of every prompt, whatever its length
    lora_factor: float = 1.03  # on the time to read a prompt; ReFT's cannot be told from 1
    lora_prompt_s: float = 0.27e-3  # of every prompt with a LoRA, whatever its length
    collective_s: float = 10e-6  # of one all-reduce, whatever its size


MEASURED_GPU = "h200"

_layer_weights = functools.lru_cache(maxsize=16)(layer_weights)


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine: a model on so many GPUs."""

    sizes: ModelSizes
    gpu: Gpu
    tensor_parallel: int
    coefficients: Coefficients = Coefficients()

    def prompt_s(self, new_tokens: float, cached_tokens: float = 0.0, lora_share: float = 1.0) -> float:
        """What a prompt adds to a full prefill batch. Cached tokens are read by attention only."""
        base = self.sizes.base
        attention = 4 * base.num_layers * base.heads * base.head_dim * (cached_tokens + new_tokens / 2)
        flops = new_tokens * (2 * self._weights(1) + attention) + 2 * base.vocabulary * base.hidden
        each = self.coefficients
        reading_s = flops / self._flops
        lora_s = lora_share * ((each.lora_factor - 1) * reading_s + each.lora_prompt_s)
        return each.prompt_s + reading_s + lora_s + self._reduce_s(new_tokens)

    def prompt_alone_s(self, new_tokens: float, cached_tokens: float = 0.0, lora_share: float = 1.0) -> float:
        """A batch with one prompt: at least all weights are read once."""
        reading = max(self.prompt_s(new_tokens, cached_tokens, lora_share), self._read_weights_s(new_tokens))
        return reading + self._overhead_s

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step of `batch` requests, each with `context_tokens` of KV."""
        rank_kv = self.sizes.kv_bytes_per_token_and_rank(self.tensor_parallel)
        base = self.sizes.base
        compute = batch * 2 * (self._weights(1) + base.vocabulary * base.hidden) / self._flops
        weights = max(self._read_weights_s(batch), compute)
        kv = batch * context_tokens * rank_kv / (self.gpu.memory_bytes_per_s * self.coefficients.bandwidth_share)
        each = batch * self.coefficients.sequence_s
        return weights + kv + each + self._reduce_s(batch) + self._overhead_s

    @property
    def _overhead_s(self) -> float:
        """Of a batch: the scheduler, and two all-reduces per layer."""
        if self.tensor_parallel == 1:
            return self.coefficients.step_s
        return self.coefficients.step_s + 2 * self.sizes.base.num_layers * self.coefficients.collective_s

    @property
    def _flops(self) -> float:
        return self.tensor_parallel * self.gpu.flops * self.coefficients.compute_share

    def _weights(self, tokens: float) -> float:
        """Number of the layers' weights that a batch of `tokens` uses; in mixtures, the expected number."""
        return _layer_weights(self.sizes.base, 0) + self._expert_weights(tokens)

    def _expert_weights(self, tokens: float) -> float:
        """Those of routed experts."""
        if (experts := self.sizes.base.experts) is None:
            return 0.0
        missed = (1 - experts.per_token / experts.count) ** tokens  # by tokens that choose at random
        one = _layer_weights(self.sizes.base, 1) - _layer_weights(self.sizes.base, 0)
        return experts.count * (1 - missed) * one

    def _read_weights_s(self, tokens: float) -> float:
        """Without the input embedding, of which a row per token is read. Quantised weights are as small as stored."""
        base = self.sizes.base
        head = base.vocabulary * base.hidden * ITEM_BYTES[self.sizes.dtype]
        others = _layer_weights(base, 0) * self.sizes.layer_item_bytes
        read = head + others + self._expert_weights(tokens) * self.sizes.expert_item_bytes
        size = min(read, self.sizes.weight_bytes) / self.tensor_parallel
        return size / (self.gpu.memory_bytes_per_s * self.coefficients.bandwidth_share)

    def _reduce_s(self, tokens: float) -> float:
        """Bytes of the two all-reduces per layer, in rings, over one direction of the links."""
        ranks = self.tensor_parallel
        size = 2 * self.sizes.base.num_layers * tokens * self.sizes.base.hidden * ITEM_BYTES[self.sizes.dtype]
        return size * 2 * (ranks - 1) / ranks / (self.gpu.link_bytes_per_s / 2)
