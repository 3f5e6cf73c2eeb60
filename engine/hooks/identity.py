"""Body of the hook that gives an adapter its revision's identity inside SGLang."""

from __future__ import annotations


def name_is_id(lora_ref_type):
    """A maker of adapter records whose id is their name. We name adapters by their revision id.

    SGLang appends the id to the prefix-cache key, so KV is shared exactly by requests of one revision,
    also after the adapter was evicted and loaded again.
    """

    def make(*, lora_name: str, **fields):
        return lora_ref_type(lora_id=lora_name, lora_name=lora_name, **fields)

    return make
