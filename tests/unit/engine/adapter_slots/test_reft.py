"""ReFT for many adapters in one batch, against the formula, adapter by adapter."""

import pytest
import torch

from engine.adapter_slots.reft import ReftFactors, ReftPool

HIDDEN, LAYERS, SLOTS, MAX_RANK = 16, 3, 4, 8


class SegmentedProducts:
    """The parts of an SGLang LoRA backend that the pool uses. As with csgmv, values beyond a rank are garbage."""

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens):
        self.max_num_tokens = max_num_tokens

    def prepare_lora_batch(
        self, forward_batch, weight_indices, lora_ranks, scalings, use_cuda_graph, use_prefill_cuda_graph
    ):
        self.is_in_graph = use_prefill_cuda_graph
        assert set(scalings) == {1.0}
        assert not use_cuda_graph
        bounds = [0]
        for length in forward_batch:
            bounds.append(bounds[-1] + length)
        self.segments = [
            (slice(begin, end), slot, lora_ranks[slot])
            for begin, end, slot in zip(bounds, bounds[1:], weight_indices, strict=False)
        ]

    def run_lora_a_sgemm(self, x, weights):
        assert x.is_contiguous()
        assert weights.is_contiguous()
        out = torch.full((len(x), weights.shape[1]), float("nan"))
        for tokens, slot, rank in self.segments:
            out[tokens, :rank] = x[tokens] @ weights[slot, :rank].T
        return out

    def run_lora_b_sgemm(self, x, weights, output_offset, output_offset_cpu, base_output):
        assert weights.is_contiguous()
        assert output_offset.tolist() == output_offset_cpu.tolist() == [0, weights.shape[1]]
        for tokens, slot, rank in self.segments:
            base_output[tokens] += x[tokens, :rank] @ weights[slot, :, :rank].T


def factors(seed: int, rank: int, layers=range(LAYERS)) -> ReftFactors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rank, HIDDEN), (HIDDEN, rank), (rank,))
    a, b, bias = (torch.randn(len(layers), *shape, generator=generator) for shape in shapes)
    return ReftFactors(torch.tensor(list(layers)), a, b, bias)


def change(own: ReftFactors, layer: int, stream: torch.Tensor) -> torch.Tensor:
    """The formula, for one token or several."""
    [place] = (own.layers == layer).nonzero().flatten().tolist()
    return (stream @ own.a[place].T + own.bias[place]) @ own.b[place].T


@pytest.fixture
def pool() -> ReftPool:
    return ReftPool(SLOTS, LAYERS, MAX_RANK, HIDDEN, torch.float32, "cpu", SegmentedProducts())


def begin(pool: ReftPool, *segments: tuple[int, int], in_graph: bool = False) -> None:
    lengths = [length for _, length in segments]
    pool.begin_batch(lengths, [slot for slot, _ in segments], lengths, in_graph)


def test_each_segment_has_its_own_adapter(pool: ReftPool):
    adapters = {0: factors(0, 1), 2: factors(2, 8), 3: factors(3, 5, layers=[1])}
    for slot, own in adapters.items():
        pool.fill(slot, own)
    begin(pool, (2, 3), (1, 2), (0, 1), (3, 4), (1, 2))
    assert pool.is_active
    slot_of_token = [2, 2, 2, 1, 1, 0, 3, 3, 3, 3, 1, 1]
    for layer in range(LAYERS):
        hidden, residual = torch.randn(12, HIDDEN), torch.randn(12, HIDDEN)
        expected = hidden.clone()
        for token, slot in enumerate(slot_of_token):
            if slot in adapters and layer in adapters[slot].layers:
                expected[token] += change(adapters[slot], layer, hidden[token] + residual[token])
        untouched = residual.clone()
        pool.apply(layer, hidden, residual)
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(residual, untouched)


def test_the_next_adapter_in_a_slot_inherits_nothing(pool: ReftPool):
    own = factors(1, 2, layers=[0])
    pool.fill(1, factors(0, 8))
    pool.fill(1, own)
    begin(pool, (1, 2))
    hidden = torch.randn(2, HIDDEN)
    before = hidden.clone()
    pool.apply(1, hidden, None)
    assert torch.equal(hidden, before)  # the new one has nothing on layer 1
    pool.apply(0, hidden, None)
    torch.testing.assert_close(hidden, before + change(own, 0, before), rtol=1e-4, atol=1e-4)
    pool.fill(1, None)
    for buffer in (pool.a, pool.b, pool.bias):
        assert not buffer.any()


def test_it_acts_in_batches_with_reft_only(pool: ReftPool):
    pool.fill(2, factors(0, 8))
    begin(pool, (0, 3), (1, 2))
    assert not pool.is_active
    begin(pool, (0, 3), (2, 2))
    assert pool.is_active
    pool.end_batch()
    assert not pool.is_active


def test_what_a_graph_recorded_acts_on_the_batch_at_hand(pool: ReftPool):
    """Capture without ReFT, replay with and without it: kernels read the same addresses each time."""
    pool.allow_graphs(16)
    own = factors(0, 3)
    pool.fill(2, own)
    pool.begin_batch([16], None, [16], in_graph=True)  # capture
    assert pool.is_active
    place = pool._slot_of_token.data_ptr()
    for segments in (((0, 2), (2, 3)), ((0, 4),)):
        begin(pool, *segments, in_graph=True)
        assert pool.is_active
        assert pool._backend.is_in_graph
        assert pool._slot_of_token.data_ptr() == place
        hidden = torch.randn(8, HIDDEN)  # padded, as a replay's
        before = hidden.clone()
        pool.apply(0, hidden, None)
        expected = before.clone()
        if len(segments) == 2:
            expected[2:5] += change(own, 0, before[2:5])
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    pool.begin_batch([5], None, [5], in_graph=True)  # the base model's: slot 2's ReFT does not act
    hidden = torch.randn(8, HIDDEN)
    before = hidden.clone()
    pool.apply(0, hidden, None)
    assert torch.equal(hidden, before)
