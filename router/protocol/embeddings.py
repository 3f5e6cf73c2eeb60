"""`/v1/embeddings`: prompts as vectors. Builds the engine requests and merges the answers.

A vector is the last hidden state of a prompt, after the model's final norm, scaled to length 1. SGLang's
`--is-embedding` engines answer the same for causal models; here it comes from engines that generate, under an adapter.
"""

import math
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from router.errors import BrokenAnswer, EngineRefusal, InvalidField
from router.protocol.field_values import shown, string
from router.protocol.request_body import Fields
from router.protocol.sse import Usage

ENCODINGS = ("float", "base64")
_LEAST_NORM = 1e-12  # as in SGLang's pooler
_ASKED = {
    # One token is generated, for nobody: of requests for none engines of all roles do not do the same.
    "sampling_params": msgspec.Raw(b'{"max_new_tokens":1,"temperature":0}'),
    "return_hidden_states": msgspec.Raw(b'"last"'),
    "stream": msgspec.Raw(b"false"),
}


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int
    hidden_states: list[float | None]  # [hidden_size]; None for NaN and infinity, which JSON has not


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo


class _Taken(msgspec.Struct):
    """The part of an engine's answer that is kept."""

    prompt_tokens: int
    embedding: msgspec.Raw  # a list of numbers, or base64


_generated = msgspec.json.Decoder(_Generated)
_taken = msgspec.json.Decoder(_Taken)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The encoding of the vectors."""

    is_base64: bool  # of float32, little-endian, as OpenAI's client asks for by default

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """Raises InvalidField."""
        if "dimensions" in fields:
            raise InvalidField(
                "dimensions is not offered: nothing says that a model or adapter was trained for shorter vectors; "
                "leave it out, and shorten the vector yourself",
                param="dimensions",
            )
        encoding = string(fields, "encoding_format") or ENCODINGS[0]
        if encoding not in ENCODINGS:
            raise InvalidField(
                f"encoding_format must be {' or '.join(ENCODINGS)} (found {shown(fields['encoding_format'])})",
                param="encoding_format",
            )
        return cls(encoding == "base64")

    @property
    def engine_fields(self) -> Fields:
        """What an engine is asked, without the prompt."""
        return dict(_ASKED)

    def parse(self, answer: bytes, worker: str) -> bytes:
        """The needed part of an engine's answer.

        Raises BrokenAnswer if it has no vector, as after an abort; EngineRefusal if its numbers are not finite.
        """
        try:
            found = _generated.decode(answer).meta_info
        except msgspec.MsgspecError:
            found = None
        if found is None or not found.hidden_states:
            raise BrokenAnswer(f"worker {worker} gave no hidden states", worker=worker)
        states = [value for value in found.hidden_states if value is not None]
        if len(states) < len(found.hidden_states):  # no other worker would answer differently
            raise EngineRefusal(
                "the vector has numbers that are not finite: under this adapter the model's numbers overflow; "
                "use another revision, with smaller weights",
                worker=worker,
                http_status=422,
            )
        norm = max(math.hypot(*states), _LEAST_NORM)
        vector = [value / norm for value in states]
        written = msgspec.json.encode(_base64(vector) if self.is_base64 else vector)
        return msgspec.json.encode(_Taken(found.prompt_tokens, msgspec.Raw(written)))

    def merge(self, parsed: Sequence[bytes], *, answer_id: str, model: str) -> bytes:
        """One answer from the kept parts of the engines' answers, in the order of the inputs. Decodes no vector."""
        parts = [_taken.decode(each) for each in parsed]
        prompt_tokens = sum(part.prompt_tokens for part in parts)
        return msgspec.json.encode({
            "id": answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "usage": Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens),
            "data": [
                {"object": "embedding", "index": index, "embedding": part.embedding}
                for index, part in enumerate(parts)
            ],
        })  # fmt: skip


def _base64(vector: list[float]) -> str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return b64encode(values.tobytes()).decode()
