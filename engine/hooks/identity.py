"""Body of the hook that makes the revision id an adapter's id inside SGLang."""

from __future__ import annotations


def name_is_id(lora_ref_type):
    """A constructor of adapter records whose id is their name. Adapters are named by their revision id.

    SGLang appends the id to the prefix-cache key, so requests share KV exactly if they use the same revision, even
    after the adapter was evicted and loaded again.
    """

    def make(*, lora_name: str, **fields):
        return lora_ref_type(lora_id=lora_name, lora_name=lora_name, **fields)

    return make
