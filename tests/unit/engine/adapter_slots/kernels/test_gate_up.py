"""Gate's and up's expand step runs exactly once: in the activation where it can, else in the projection.

The kernel that joins them is interpreted on a CPU, and compiled on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.hooks import lora_kernels
from engine.hooks.ledger import hooks_for


class Activation:
    """The parts of SGLang's SiluAndMul that the hooks use."""

    def __init__(self) -> None:
        self._forward_method = self.forward_cuda

    def forward_cuda(self, x):
        return lora_kernels.expand_in_activation(lambda _self, x: ("activated", x), self, x)

    def forward_native(self, x):
        return ("activated natively", x)

    def __call__(self, x):
        return self._forward_method(x)


class Projection:
    """The parts of SGLang's LoRA wrapper that the hooks use."""

    def __init__(self, *, name: str = "csgmv", gathers: bool = False, num_columns: int = 8) -> None:
        self.use_gate_up_lora = True
        self.lora_backend = SimpleNamespace(name=name, batch_info="batch")
        self.base_layer = SimpleNamespace(gather_output=gathers)
        self.A_buffer, self.B_buffer = "A", torch.zeros(1, 8, 2)
        self.base_output = torch.zeros(3, num_columns)
        self.expanded = 0

    def _expand(self, _self, base_output, _x):
        self.expanded += 1
        return base_output

    def __call__(self, x):
        return lora_kernels.leave_expand_to_activation(self._expand, self, self.base_output, x)


class Mlp:
    def __init__(self, projection: Projection) -> None:
        self.gate_up_proj, self.act_fn = projection, Activation()

    def forward(self, x):
        return self.act_fn(self.gate_up_proj(x))

    def __call__(self, x):
        return lora_kernels.join_expand_and_activation(type(self).forward, self, x)


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    """What the kernel is called with."""
    seen: list[tuple] = []

    def activate(*args):
        seen.append(args)
        return "activated with the adapter"

    chunked = SimpleNamespace(chunked_sgmv_lora_shrink_forward=lambda **kwargs: ("A x", kwargs))
    monkeypatch.setitem(sys.modules, "sglang.srt.lora.backend.chunked_backend", chunked)
    monkeypatch.setitem(sys.modules, "engine.adapter_slots.gate_up", SimpleNamespace(expand_and_activate=activate))
    return seen


def test_the_activation_expands(joined):
    projection = Projection()
    assert Mlp(projection)("x") == "activated with the adapter"
    shrunk = ("A x", {"x": "x", "weights": "A", "batch_info": "batch", "num_slices": 2})
    assert joined == [(shrunk, projection.B_buffer, "batch", projection.base_output)]
    assert projection.expanded == 0


@pytest.mark.parametrize(
    "projection",
    [
        Projection(name="triton"),
        Projection(gathers=True),
        Projection(num_columns=12),  # a third part that LoRA does not adapt
    ],
)
def test_another_layout_expands_in_the_projection(joined, projection):
    assert Mlp(projection)("x") == ("activated", projection.base_output)
    assert (projection.expanded, joined) == (1, [])


def test_a_projection_outside_of_an_mlp_expands_itself(joined):
    projection = Projection()
    projection("x")
    assert (projection.expanded, joined) == (1, [])


def test_an_activation_without_the_hook_gets_the_full_output(joined):
    mlp = Mlp(Projection())
    mlp.act_fn._forward_method = mlp.act_fn.forward_native  # as in SGLang's torch.compile mode
    assert mlp("x") == ("activated natively", mlp.gate_up_proj.base_output)
    assert (mlp.gate_up_proj.expanded, joined) == (1, [])


def test_a_batch_without_adapters_runs_as_in_sglang(joined):
    mlp = Mlp(Projection())
    mlp.gate_up_proj = lambda x: x  # the wrapper does not apply LoRA
    assert mlp("x") == ("activated", "x")
    assert joined == []


def test_a_left_step_that_nobody_runs_is_an_error(joined):
    mlp = Mlp(Projection())
    with pytest.raises(RuntimeError, match="an adapter was not applied"):
        lora_kernels.join_expand_and_activation(lambda mlp, x: mlp.gate_up_proj(x), mlp, "x")
    with pytest.raises(RuntimeError, match="an adapter was not applied"):
        lora_kernels.join_expand_and_activation(lambda mlp, x: mlp.act_fn(mlp.gate_up_proj(x).clone()), mlp, "x")
    assert mlp("x") == "activated with the adapter"  # nothing is left of the errors


def test_only_gpu_engines_with_adapters_have_the_hooks():
    def has_them(role: str, device: str) -> bool:
        return lora_kernels.expand_in_activation in {hook.fn for hook in hooks_for(role, device)}

    assert has_them("unified", "cuda")
    assert has_them("prefill", "cuda")
    assert not has_them("decode", "cuda")
    assert not has_them("stock", "cuda")
    assert not has_them("unified", "cpu")


@pytest.mark.slow
def test_against_the_formula():
    script = Path(__file__).with_name("gate_up_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
