"""`/v1/embeddings`: what a request may say, what engines are asked, and the vectors."""

import json
import math
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from support.constants import with_constants
from support.routers.admission import admit, sent

from cluster.config.limits import RequestLimits
from router.errors import BrokenAnswer, EngineRefusal, InvalidField
from router.protocol.embeddings import Vectors
from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint


def test_engines_get_our_fields_only() -> None:
    fields = {"user": "me", "encoding_format": "base64", "dimensions": None}
    assert sent(Endpoint.EMBEDDINGS, **fields) == [{
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_hidden_states": "last",
        "stream": False,
    }]  # fmt: skip
    assert not admit(Endpoint.EMBEDDINGS, **fields).generates


def test_inputs_are_bounded_together() -> None:
    limits = Limits(128, 1000, 4096, with_constants(RequestLimits, choice_bytes=2**20))
    admit(Endpoint.EMBEDDINGS, limits, input=["x" * 60_000] * 16)
    with pytest.raises(InvalidField, match="at most 1048576 are served") as wrong:
        admit(Endpoint.EMBEDDINGS, limits, input=["x" * 60_000] * 18)
    assert wrong.value.param == "input"


def generated(hidden_states: Any, prompt_tokens: int = 3) -> bytes:
    meta_info = {"id": "r", "prompt_tokens": prompt_tokens, "hidden_states": hidden_states}
    return json.dumps({"text": "x", "output_ids": [1], "meta_info": meta_info}).encode()


def embed(vectors: Vectors, *answers: bytes) -> dict[str, Any]:
    taken = [vectors.parse(answer, "p0") for answer in answers]
    return json.loads(vectors.merge(taken, answer_id="embd-1", model="base"))


def test_vectors_have_length_one() -> None:
    answer = embed(Vectors(is_base64=False), generated([3.0, -4.0]), generated([0, 0, 1e-3], prompt_tokens=4))
    assert [each["embedding"] for each in answer["data"]] == [pytest.approx([0.6, -0.8]), pytest.approx([0, 0, 1])]
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "embedding"), (1, "embedding")]
    assert (answer["id"], answer["object"], answer["model"]) == ("embd-1", "list", "base")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (7, 7)
    (zero,) = embed(Vectors(is_base64=False), generated([0.0, 0.0]))["data"]
    assert zero["embedding"] == [0, 0]


def test_base64_is_of_little_endian_float32() -> None:
    values = [math.sin(i) for i in range(50)]
    (as_numbers,) = embed(Vectors(is_base64=False), generated(values))["data"]
    (as_base64,) = embed(Vectors(is_base64=True), generated(values))["data"]
    found = np.frombuffer(b64decode(as_base64["embedding"]), "<f4")
    assert np.array_equal(found, np.array(as_numbers["embedding"], "<f4"))


@pytest.mark.parametrize(
    "answer",
    [generated([]), generated(None), generated(["1"]), b'{"text": "", "meta_info": {"prompt_tokens": 3}}'],
)
def test_an_answer_without_a_vector_is_broken(answer: bytes) -> None:
    with pytest.raises(BrokenAnswer, match="p0"):
        Vectors(is_base64=False).parse(answer, "p0")


def test_numbers_that_are_not_finite_are_no_reason_to_ask_another_worker() -> None:
    with pytest.raises(EngineRefusal, match="not finite") as refused:
        Vectors(is_base64=True).parse(generated([1.0, None]), "p0")
    assert (refused.value.http_status, refused.value.retryable) == (422, False)
