"""What is on the wire: our messages are the SDK's, sizes are bounded, nothing unknown is dropped."""

import random
from typing import Any

import numpy as np
import pytest
import zstandard
from support.training.trainer import datum
from tinker.proto import tinker_public_pb2 as sdk

from training.service import tinker_pb2 as ours
from training.service.data.answers import EarlierPasses
from training.service.data.passes import DataLimits, pass_of
from training.service.errors import Refused, ServiceError, TooLarge
from training.service.messages import CreateSession, Sample, decoded
from training.service.wire import MAX_BODY_BYTES, check_no_unknown_field, inflated, parsed_request

READ = {
    "ForwardBackwardRequest",
    "LossConfigValue",
    "Datum",
    "Chunk",
    "EncodedTextChunk",
    "Tensor",
    "ProvenanceSpan",
    "PromptProvenanceSpan",
    "SampledProvenanceSpan",
}


def described(field: Any) -> tuple[Any, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof and field.containing_oneof.name
    return field.number, field.type, field.is_repeated, kind and kind.name, oneof


def fields_of(message: Any) -> dict[str, tuple[Any, ...]]:
    found = {field.name: described(field) for field in message.fields}
    for nested in message.nested_types:  # entries of maps
        found |= {f"{nested.name}.{field.name}": described(field) for field in nested.fields}
    return found


def test_messages_are_those_of_the_sdk():
    theirs = sdk.DESCRIPTOR.message_types_by_name
    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        own, other = fields_of(message), fields_of(theirs[name])
        assert own.items() <= other.items(), name
        if name in READ:  # a field that a client may send
            assert own == other, name
    for name, enum in ours.DESCRIPTOR.enum_types_by_name.items():
        numbers = {value.name: value.number for value in enum.values}
        assert numbers == {value.name: value.number for value in sdk.DESCRIPTOR.enum_types_by_name[name].values}


def test_a_body_is_bounded_when_inflated():
    body = b"prelude" * 1000
    assert inflated(zstandard.compress(body), MAX_BODY_BYTES) == body
    assert len(inflated(zstandard.compress(bytes(MAX_BODY_BYTES)), MAX_BODY_BYTES)) == MAX_BODY_BYTES
    with pytest.raises(TooLarge):
        inflated(zstandard.compress(bytes(MAX_BODY_BYTES + 1)), MAX_BODY_BYTES)
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(MAX_BODY_BYTES + 1))
    for hostile in (unknown, b"", b"no zstd", zstandard.compress(body)[:-4], zstandard.compress(body) + b"more"):
        with pytest.raises(Refused):
            inflated(hostile, MAX_BODY_BYTES)


def nested(*numbers: int, content: bytes = b"") -> bytes:
    """A message within a message within …, by their fields' numbers from the outermost."""
    for number in reversed(numbers):
        length = bytes(len(content) >> 7 * place & 127 | 128 for place in range(4)) + b"\0"
        content = bytes([number << 3 | 2]) + length + content
    return content


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * 2**23,
        nested(3, content=b"\x0a\x00" * 2**22),
        nested(3, content=b"\x12\x00" * 2**22),
        nested(3, content=b"\x0a\x00" * 2**12) * 2**7,
        b"\x3a\x00" * 2**22,
        b"\x30\x01" * 2**22,  # forward_only
    ],
    ids=["datums", "chunks", "inputs", "chunks of many", "config", "booleans"],
)
def test_a_body_of_very_many_parts_is_not_parsed(body: bytes):
    """Compressed, it has some kilobytes, and parsed hundreds of megabytes."""
    assert len(zstandard.compress(body)) < 4096
    with pytest.raises(Refused, match="262144 datums, chunks, inputs and spans"):
        parsed_request(body)


@pytest.mark.parametrize(
    "body", [b"\xff" * 100, b"\x1a", b"\x1a\xff", b"\x1b\x1c", nested(3, content=b"\x0b"), b"\x1a\x05a"]
)
def test_what_is_no_message_is_refused(body: bytes):
    with pytest.raises(Refused, match="is no ForwardBackwardRequest"):
        parsed_request(body)


def test_a_number_of_many_bytes_is_not_read_to_its_end():
    with pytest.raises(Refused, match="a number that does not end"):
        parsed_request(b"\x98" + b"\x80" * 10 + b"\x00\x01")


def test_as_much_as_a_body_may_have_is_parsed():
    many = ours.Datum()
    for _ in range(255):
        many.model_input.add().encoded_text.tokens = b"\x01\x00\x00\x00"
    request = ours.ForwardBackwardRequest(data=[many] * 1023, loss_fn="ppo", seq_id=-1, loss_fn_config={"a": 1.5})
    assert parsed_request(request.SerializeToString()) == request


def test_what_a_newer_client_says_is_not_dropped():
    request = sdk.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    request.data.add().MergeFromString(datum([1, 2, 3]).SerializeToString())
    check_no_unknown_field(parsed_request(request.SerializeToString()))
    for within in (
        lambda newer: newer,
        lambda newer: newer.data[0],
        lambda newer: newer.data[0].loss_fn_inputs["target_tokens"],
        lambda newer: newer.data[0].model_input[0].encoded_text,
    ):
        newer = sdk.ForwardBackwardRequest.FromString(request.SerializeToString())
        within(newer).MergeFromString(b"\xa2\x06\x01x")  # field 100
        with pytest.raises(Refused, match="4 bytes of fields unknown here"):
            check_no_unknown_field(parsed_request(newer.SerializeToString()))


def test_any_bytes_are_refused_or_parsed():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen, limits = random.Random(seed), DataLimits(vocabulary=64, max_tokens=16)
    policy = {"logprobs": [0.0, 0.0], "advantages": [0.0, 1.0], "answer": [0.0, 1.0]}
    for loss, inputs in (("cross_entropy", {"weights": [0, 1]}), ("ppo", policy)):
        whole = ours.ForwardBackwardRequest(data=[datum([1, 2, 3], **inputs)], loss_fn=loss).SerializeToString()
        for _ in range(1000):
            body = bytearray(whole if chosen.random() < 0.7 else chosen.randbytes(40))
            for _ in range(chosen.randrange(4)):
                body[chosen.randrange(len(body))] = chosen.randrange(256)
            try:
                task = pass_of(parsed_request(bytes(body)), "prefill", limits, EarlierPasses(), lambda _sequence: ())
            except ServiceError:
                continue
            for each in task.data:
                assert set(each.token_ids) | set(each.target_ids) <= set(range(64))
                assert all(np.isfinite(each.input(name)).all() for name in each.inputs)


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        (b'{"tags": [], "colour": 1}', CreateSession, "colour"),
        (b'{"tags": 1}', CreateSession, "tags"),
        (b"[" * 100_000, CreateSession, "CreateSession"),
        (b'{"tags": ["\xff"]}', CreateSession, "CreateSession"),
        (
            b'{"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}, '
            b'"topk_sample_logprobs": 3}',
            Sample,
            "topk_sample_logprobs is not offered",
        ),
    ],
)
def test_json_is_refused_by_name(body: bytes, kind: Any, named: str):
    with pytest.raises(Refused, match=named):
        decoded(body, kind)
