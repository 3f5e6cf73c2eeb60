"""The bodies of engine calls: the client's fields, the adapter, and the KV handoff between the engines of a pair."""

import os
from typing import Any, Self

import msgspec

from cluster.config.workers import NOBODY
from router.placement.request import Placement
from router.protocol.validation import Sequence

_Fields = dict[str, Any]  # the client's fields as its bytes, and the router's own as values

# One part for most requests. A long prompt is a part of its own, the client's bytes, which all calls of a request
# share.
Body = bytes | tuple[bytes | memoryview, ...]
_LONG = 16 * 1024
_USAGE = msgspec.Raw(b'{"include_usage":true}')
_PROMPTS = ("messages", "prompt", "input_ids", "text", "tools", "suffix")


class KvHandoff(msgspec.Struct, frozen=True):
    """Identifies one KV transfer: a KV room at the prefill worker, one request id at both engines."""

    rid: str
    room: int  # in [0, 2^63), never used twice
    kv_host: str
    kv_bootstrap_port: int

    @classmethod
    def of(cls, placement: Placement, rid: str) -> Self:
        """The handoff of a pair or, where a prefill worker only reads the prompt, one to nobody."""
        prefill, room = placement.prefill, int.from_bytes(os.urandom(8), "big") >> 1
        return cls(rid, room, NOBODY if placement.is_single else prefill.kv_host, prefill.kv_bootstrap_port)


def decode_body(sequence: Sequence, model: str, handoff: KvHandoff, *, wants_prompt_logprobs: bool = False) -> Body:
    """The decode call: the client's request on the base model. No parameter can name an adapter."""
    fields = _common_fields(sequence, model, handoff.rid, wants_prompt_logprobs) | _handoff_fields(handoff)
    return _encoded(_with_usage(fields))


def reader_body(
    sequence: Sequence,
    model: str,
    rid: str,
    *,
    namespace: str,
    revision_id: str | None,
    handoff: KvHandoff | None = None,
    generates: bool = True,
    wants_prompt_logprobs: bool = False,
) -> Body:
    """The call that reads the prompt: under the revision, in this namespace of the prefix cache.

    With a handoff it generates no more than the first token; otherwise, at a unified worker, the whole answer. The one
    token of a request that does not generate is discarded.
    """
    fields = _common_fields(sequence, model, rid, wants_prompt_logprobs)
    fields["extra_key"] = f"{namespace}|"
    if revision_id is not None:
        fields["lora_path"] = revision_id
    if not generates and "prompt" in fields:  # a completion; embeddings have their own sampling parameters
        fields["max_tokens"] = 1
    if handoff is None:
        return _encoded(_with_usage(fields))
    fields |= _handoff_fields(handoff)
    if generates:
        fields.pop("stream_options", None)
        fields["stream"] = False
    return _encoded(fields)


def _common_fields(sequence: Sequence, model: str, rid: str, wants_prompt_logprobs: bool) -> _Fields:
    fields: _Fields = {**sequence.fields, "model": model, "rid": rid}
    if sequence.most_tokens is not None:
        fields["max_tokens"] = sequence.most_tokens
    if wants_prompt_logprobs and bytes(fields["logprobs"]) == b"0":
        fields["logprobs"] = 1  # for 0 engines compute no prompt log-probabilities, and their answer fails
    return fields


def _with_usage(fields: _Fields) -> _Fields:
    """Ask for the usage event of a stream, because its other events do not say how many tokens were generated."""
    if bytes(fields.get("stream", b"")) == b"true":
        options = fields.get("stream_options")
        own = {} if options is None else msgspec.json.decode(options, type=dict[str, msgspec.Raw])
        fields["stream_options"] = {**own, "include_usage": True} if own else _USAGE
    return fields


def _handoff_fields(handoff: KvHandoff) -> _Fields:
    return {
        "bootstrap_host": handoff.kv_host,
        "bootstrap_port": handoff.kv_bootstrap_port,
        "bootstrap_room": handoff.room,
    }


def _encoded(fields: _Fields) -> Body:
    long = [name for name in _PROMPTS if name in fields and len(memoryview(fields[name])) > _LONG]
    if not long:
        return msgspec.json.encode(fields)
    short = msgspec.json.encode({name: value for name, value in fields.items() if name not in long})  # never empty
    parts: list[bytes | memoryview] = [short[:-1]]
    for name in long:
        parts += [b',"%b":' % name.encode(), memoryview(fields[name])]
    return (*parts, b"}")
