"""A plugin that gives SGLang's `torch_native` attention, the only one of CPU engines here, the sinks of gpt-oss.

So CPU tests check all of a gpt-oss engine but SGLang's own kernels with sinks; `test_bfloat16.py` has those, on GPUs.
"""

import os
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[2]
_NAME = "intel_amx"  # with which SGLang takes gpt-oss on CPUs; one without AMX then gets torch_native


def give_engines_sinks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Have engines that are started from now on load the plugin, by its entry point in a distribution in this folder.

    Returns the arguments of an engine that uses it.
    """
    distribution = folder / "attention_sinks-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-sinks\nVersion: 1\n")
    entry = f"[sglang.srt.plugins]\nattention_sinks = {__name__}:load\n"
    (distribution / "entry_points.txt").write_text(entry)
    path = [str(folder), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return "--attention-backend", _NAME


def load() -> None:
    """Change this process's SGLang, or end it: SGLang only logs exceptions of plugins."""
    try:
        _install()
    except Exception as error:  # noqa: BLE001 an engine without sinks would fail tests for another reason
        sys.exit(f"attention sinks could not be installed: {error!r}")


def _install() -> None:
    import torch
    from sglang.srt.layers.attention import torch_native_backend as native
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from torch.nn.functional import pad

    plain = native.scaled_dot_product_attention
    of_layer: list[torch.Tensor] = []  # the sinks of the layer that computes attention now, [heads]

    class WithSinks(native.TorchNativeAttnBackend):
        def forward(self, *args, sinks=None, **kwargs):
            of_layer[:] = [] if sinks is None else [sinks]
            return super().forward(*args, **kwargs)

    def attention(query, key, value, attn_mask=None, is_causal=False, **others):
        """A sink is the logit of one more key, whose value is zero: the last one, in a dimension of its own.

        query: [1, heads, queries, size]; key, value: [1, KV heads, keys, size].
        """
        if not of_layer:
            return plain(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **others)
        logits = (of_layer[0].to(query) / others["scale"]).view(1, -1, 1, 1).expand(*query.shape[:-1], 1)
        if attn_mask is None:
            seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
            attn_mask = seen.tril() if is_causal else seen
        key = pad(key, (0, 1, 0, 1))
        key[..., -1, -1] = 1
        return plain(
            torch.cat([query, logits], -1),
            key,
            pad(value, (0, 0, 0, 1)),
            attn_mask=pad(attn_mask, (0, 1), value=True),
            **others,
        )

    native.scaled_dot_product_attention = attention
    for name in (_NAME, "torch_native"):
        register_attention_backend(name)(WithSinks)
