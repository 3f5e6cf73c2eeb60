"""The delay of NIXL's progress thread, by the engine's device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks.ledger import hooks_for


class AgentConfig:
    """Takes attributes, as the binding does."""


@pytest.mark.parametrize(("device", "delay_us"), [("cpu", 2000), ("cuda", 200)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_thread_sleeps_whatever_is_asked_for(role: str, device: str, delay_us: int):
    [hook] = [each for each in hooks_for(role, device) if each.name.startswith("kv_progress_thread_")]
    bindings = hook.fn(SimpleNamespace(__name__="nixlBind", nixlAgentConfig=AgentConfig, other=7))
    config = bindings.nixlAgentConfig()
    config.pthrDelay, config.useProgThread = 0, True
    assert (config.pthrDelay, config.useProgThread, bindings.other) == (delay_us, True, 7)
