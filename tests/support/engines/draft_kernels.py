"""What SGLang's EAGLE takes from kernels that exist for GPUs and AMX only, in torch, so that it runs on CPU engines.

It is a plugin of SGLang: `write_plugin` writes a folder for PYTHONPATH that makes engines load it. Only chains of
guesses (`--speculative-eagle-topk 1`).
"""

from pathlib import Path


def write_plugin(folder: Path) -> str:
    """What PYTHONPATH must have for engines to load this module."""
    info = folder / "draft_kernels-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draft-kernels\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ndraft_kernels = support.engines.draft_kernels:install\n"
    )
    return f"{folder}:{Path(__file__).parents[2]}"


def install() -> None:
    """Give the process the kernels."""
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.mem_cache import allocation

    spec_tree.sgl_build_tree_kernel_efficient_cpu = _build_chain
    spec_tree.sgl_verify_tree_greedy_cpu = _verify
    cache_locs.assign_draft_cache_locs_contiguous_cpu = _slots_of_guesses
    cache_locs.assign_extend_cache_locs_cpu = _slots_between
    allocation.assign_req_to_token_pool_cpu = _write_slots
    eagle.fill_bonus_tokens_cpu = _last_accepted
    cache_move.copy_all_layer_kv_cache_cpu = _move_nothing
    _install_attention()


def _build_chain(
    _parents, _index, seq_lens, _mask, positions, retrieve, following, sibling, _topk, _steps, width, _mode
):
    import torch

    count = seq_lens.numel()
    retrieve.copy_(torch.arange(count * width).view(count, width))
    following.copy_(torch.tensor([*range(1, width), -1]).expand(count, width))
    sibling.fill_(-1)
    positions.copy_((seq_lens[:, None] + torch.arange(width)).flatten())


def _verify(*, predicts, accept_index, accept_token_num, candidates, target_predict, **_tree):
    rows, width = candidates.shape
    for row in range(rows):
        right = 0
        while right + 1 < width and candidates[row, right + 1] == target_predict[row, right]:
            right += 1
        for depth in range(right + 1):
            accept_index[row, depth] = row * width + depth
            predicts[row * width + depth] = target_predict[row, depth]
        accept_token_num[row] = right


def _slots_of_guesses(requests, table, seq_lens, slots, _length, topk, steps):
    import torch

    columns = seq_lens[:, None] + torch.arange(topk * steps)
    slots.copy_(torch.gather(table[requests.long()], 1, columns.long()).flatten())


def _slots_between(requests, table, begins, ends, slots, _length):
    import torch

    bounds = zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True)
    slots.copy_(torch.cat([table[request, begin:end] for request, begin, end in bounds]))


def _write_slots(requests, table, begins, ends, slots, _length):
    at = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[request, begin:end] = slots[at : at + end - begin].to(table.dtype)
        at += end - begin


def _last_accepted(tokens, counts, found, width):
    flat = tokens.flatten()
    for row, count in enumerate(counts.tolist()):
        found[row] = flat[row * width + count - 1]


def _move_nothing(_pointers, _strides, targets, sources):
    assert targets.equal(sources), "guesses of a chain stay where they are"


def _install_attention() -> None:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class Changed:
        """A batch with other lengths."""

        def __init__(self, batch, **lengths):
            self.__dict__.update(lengths, batch=batch)

        def __getattr__(self, name):
            return getattr(self.batch, name)

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(backend, q, k, v, layer, batch, *args, **kwargs):
        if batch.forward_mode.is_target_verify():
            begins, width = batch.seq_lens, batch.spec_info.draft_token_num
            lengths = {"extend_prefix_lens": begins, "extend_seq_lens": torch.full_like(begins, width)}
            batch = Changed(batch, seq_lens=begins + width, **lengths)
        return extend(backend, q, k, v, layer, batch, *args, **kwargs)

    class Step(TorchNativeAttnBackend):
        def __init__(self, runner, step):
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q, k, v, layer, batch, *args, **kwargs):
            batch = Changed(batch, seq_lens=batch.seq_lens + self.step + 1)
            return super().forward_decode(q, k, v, layer, batch, *args, **kwargs)

    class Steps:
        def __init__(self, runner, steps):
            self.attn_backends = [Step(runner, step) for step in range(steps - 1)]

        def init_forward_metadata(self, batch):
            for each in self.attn_backends:
                each.init_forward_metadata(batch)

    create = DraftBackendFactory._create_backend

    def create_backend(factory, name, backends, error, **kwargs):
        runner = factory.draft_model_runner
        is_of_steps = "decode attention" in error
        made = Steps(runner, factory.speculative_num_steps) if is_of_steps else TorchNativeAttnBackend(runner)
        return create(factory, name, {**backends, "torch_native": lambda: ("torch_native", made)}, error, **kwargs)

    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory._create_backend = create_backend
