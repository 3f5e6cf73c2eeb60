"""The delay of NIXL's progress thread, by the engine's device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks.kv import progress


class AgentConfig:
    """Takes attributes, as the binding does."""


@pytest.mark.parametrize(("device", "delay_us"), [("cpu", 2000), ("cuda", 200)])
def test_the_thread_sleeps_whatever_is_asked_for(device: str, delay_us: int, monkeypatch):
    monkeypatch.setenv("PRELUDE_ENGINE_DEVICE", device)
    bindings = progress.patient(SimpleNamespace(__name__="nixlBind", nixlAgentConfig=AgentConfig, other=7))
    config = bindings.nixlAgentConfig()
    config.pthrDelay, config.useProgThread = 0, True
    assert (config.pthrDelay, config.useProgThread, bindings.other) == (delay_us, True, 7)
