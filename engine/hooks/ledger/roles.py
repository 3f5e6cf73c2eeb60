"""The roles of engines, by what they share."""

from __future__ import annotations

ADAPTER_ROLES = frozenset({"prefill", "unified"})
LORA_ROLES = frozenset({"prefill", "unified", "stock"})
DECODE = frozenset({"decode"})
UNIFIED = frozenset({"unified"})
GENERATING_ROLES = frozenset({"decode", "unified"})
PAIR_ROLES = frozenset({"prefill", "decode"})
TRANSFER_ROLES = PAIR_ROLES | {"stock"}  # a benchmark has stock SGLang's pair, too
OUR_ROLES = frozenset({"prefill", "decode", "unified"})
