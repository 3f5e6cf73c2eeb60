"""Estimates the size of a prompt without a tokenizer, and hashes its beginning for prefix affinity."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.placement.request import PromptSize
from router.protocol.field_values import TYPICAL_ANSWER_TOKENS, answer_limit
from router.protocol.request_body import Fields

_BLOCK_BYTES = 512
_MAX_BLOCKS = 32  # 16 KiB of a prompt
_INITIAL_BYTES_PER_TOKEN = 4.0
_WEIGHT_OF_NEWEST = 0.05
# Roughly in a template's order. Scores and embeddings have `text` or `input_ids`.
_PROMPT_FIELDS = ("tools", "chat_template_kwargs", "messages", "prompt", "text", "input_ids")


class PromptMeter:
    """Estimates tokens from bytes of JSON. The ratio is corrected by engines' token counts."""

    def __init__(self) -> None:
        self._bytes_per_token = _INITIAL_BYTES_PER_TOKEN

    def estimate(self, fields: Fields, prompts: Sequence[msgspec.Raw]) -> int:
        """Estimated tokens of all prompts of a validated request: of `prompts`, or of its messages."""
        texts = [fields[name] for name in _PROMPT_FIELDS if name in fields and name != "prompt"]
        tokens = 0
        for text in (*prompts, *texts):
            view = memoryview(text)
            if view[:1] == b"[" and _is_token_ids(bytes(view[:17])):
                tokens += bytes(view).count(b",") + 1
            else:
                tokens += int(len(view) / self._bytes_per_token) + 1
        return tokens

    def measure(self, fields: Fields, *, generates: bool = True) -> PromptSize:
        """The size of one sequence of a validated request. `generates`: its prompt is not only read."""
        texts, text_bytes, ids = [], 0, None
        for name in _PROMPT_FIELDS:
            if (raw := fields.get(name)) is not None:
                texts.append(text := bytes(raw))
                text_bytes += len(text)
                if ids is None and _is_token_ids(text):
                    ids = text
        bytes_per_token = self._bytes_per_token
        if ids is not None:
            text_bytes, prompt_tokens = 0, ids.count(b",") + 1
            bytes_per_token = len(ids) / prompt_tokens
        else:
            prompt_tokens = int(text_bytes / bytes_per_token) + 1
        limit = answer_limit(fields)
        answer_tokens = (TYPICAL_ANSWER_TOKENS if limit is None else limit) if generates else 0
        blocks = _chained_hashes(texts) if text_bytes >= _BLOCK_BYTES or ids is not None else ()
        tokens_per_block = _BLOCK_BYTES / bytes_per_token
        return PromptSize(prompt_tokens, prompt_tokens + answer_tokens, blocks, tokens_per_block, text_bytes)

    def observe(self, size: PromptSize, prompt_tokens: int) -> None:
        """Learn from an engine's token count of a prompt that was measured."""
        if prompt_tokens > 0 and size.text_bytes:
            found = size.text_bytes / prompt_tokens
            self._bytes_per_token += _WEIGHT_OF_NEWEST * (min(max(found, 0.5), 64.0) - self._bytes_per_token)


def _is_token_ids(text: bytes) -> bool:
    return text[:1] == b"[" and text[1:16].lstrip()[:1].isdigit()


def _chained_hashes(texts: Sequence[bytes]) -> tuple[int, ...]:
    """One hash for each whole block of the prompt's beginning, over all bytes up to the block's end."""
    text = b"".join([each[: _BLOCK_BYTES * _MAX_BLOCKS] for each in texts])
    hashes, chained = [], 0
    for end in range(_BLOCK_BYTES, min(len(text), _BLOCK_BYTES * _MAX_BLOCKS) + 1, _BLOCK_BYTES):
        chained = hash((chained, text[end - _BLOCK_BYTES : end]))
        hashes.append(chained)
    return tuple(hashes)
