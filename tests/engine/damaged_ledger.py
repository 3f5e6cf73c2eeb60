# ruff: noqa: E402 the environment and the CPU support come first
"""Loads the plugin, in a separate process, with one error in the ledger; exits with 99 if it is not detected."""

from __future__ import annotations

import dataclasses
import os
import sys

os.environ["PRELUDE_ENGINE_ROLE"], os.environ["PRELUDE_ENGINE_DEVICE"] = sys.argv[1], "cpu"
os.environ["PRELUDE_ENGINE_REPORTS"] = sys.argv[2]

from engine import cpu_support

cpu_support.install()

from sglang.srt.plugins import hook_registry, load_plugins

from engine.hooks import installation, ledger

first, *rest = ledger.HOOKS
damage = os.environ["DAMAGE"]
if damage == "source":
    damaged = dataclasses.replace(first, source_sha256="0" * 64)
elif damage == "target":
    damaged = dataclasses.replace(rest[0], target="sglang.srt.lora.lora_manager.LoRAManager.no_such_method")
elif damage == "module":
    damaged = dataclasses.replace(rest[0], target="sglang.no_such_module.Class.method")
else:
    damaged = first
if damage == "version":
    installation.SGLANG_VERSION = "0.0.1"
if damage == "untaken":  # the registry only logs what it cannot apply
    hook_registry.HookRegistry._apply_target = classmethod(lambda *_: None)
ledger.HOOKS = (damaged, *rest)
load_plugins()
sys.exit(99)
