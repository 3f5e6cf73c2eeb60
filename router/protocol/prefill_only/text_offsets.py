"""Where the tokens of a completion begin in its text: `text_offset`, for which SGLang writes -1 for each token."""

from __future__ import annotations

from typing import Any

import msgspec

from router.protocol.field_values import encoded
from router.protocol.request_body import Fields

_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_tokens = msgspec.json.Decoder(list[str])

# Characters of the text that tokens do not have: a space before a word, and those of tokens that are not found.
_MAX_SKIPPED = 1024


def with_text_offsets(answer: bytes) -> bytes:
    """A whole completion of one choice, with the offsets of its tokens if it has log-probabilities."""
    parsed = _object.decode(answer)
    choice = _choices.decode(parsed["choices"])[0]
    if bytes(choice["logprobs"]) == b"null":
        return answer
    logprobs: dict[str, Any] = _object.decode(choice["logprobs"])
    offsets = text_offsets(_tokens.decode(logprobs["tokens"]), msgspec.json.decode(choice["text"], type=str))
    choice["logprobs"] = encoded({**logprobs, "text_offset": offsets})
    return msgspec.json.encode({**parsed, "choices": encoded([choice])})


def text_offsets(tokens: list[str], text: str) -> list[int]:
    """The place in `text` at which each token begins, in characters.

    One that the text does not have, such as a special token, a part of a character, or what a stop cut off, is where
    the token before it ends.
    """
    offsets, end, skipped = [], 0, 1
    for token in tokens:
        begin = text.find(token, end, end + skipped + len(token))
        if begin < 0:
            offsets.append(end)
            skipped = min(skipped + len(token), _MAX_SKIPPED)
        else:
            offsets.append(begin)
            end = begin + len(token)
            skipped = 1 if token.strip() else min(skipped + 1, _MAX_SKIPPED)
    return offsets
