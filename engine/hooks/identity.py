"""Bodies of the hooks that replace constructors in SGLang's server: adapters' ids, and a number that fits JSON."""

from __future__ import annotations


def name_is_id(lora_ref_type):
    """A constructor of adapter records whose id is their name. Adapters are named by their revision id.

    SGLang appends the id to the prefix-cache key, so requests share KV exactly if they use the same revision, even
    after the adapter was evicted and loaded again.
    """

    def make(*, lora_name: str, **fields):
        return lora_ref_type(lora_id=lora_name, lora_name=lora_name, **fields)

    return make


_MAX_EXACT = 2**53  # the integers of JSON that every client reads exactly


def length_fits_json(response_type):
    """A constructor of /v1/tokenize's answers in which a tokenizer without a limit of length has -1.

    transformers gives such a tokenizer a limit of 10^30, which SGLang's JSON encoder refuses.
    """

    def make(*, max_model_len: int, **fields):
        return response_type(max_model_len=max_model_len if max_model_len <= _MAX_EXACT else -1, **fields)

    return make
