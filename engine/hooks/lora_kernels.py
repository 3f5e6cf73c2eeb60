"""Body of the hook by which LoRA's second product runs in a kernel of our own."""

from __future__ import annotations


def expand_with_wide_accesses(_original):
    """Our kernel in place of SGLang's, with the same arguments."""
    from engine.adapter_slots.lora_expand import expand  # here, for the ledger is read by processes that have no triton

    return expand
