"""Where SGLang's own code prepares a long request, for `hooks_in_action.py`: on the event loop's thread or not."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

LONG = "the sea " * 1000
RAW = SimpleNamespace(headers={"content-length": str(len(LONG))})


class _Tokenizer:
    """Notes the thread that it is called in."""

    is_fast = True
    model_max_length = 10**30  # that transformers gives one without a limit

    def __init__(self) -> None:
        self.was_on_loop: list[bool] = []

    def __call__(self, texts, **_options):
        self._note()
        return {"input_ids": [[len(text)] for text in texts]}

    def encode(self, text, **_options):
        self._note()
        return [len(text)]

    def decode(self, tokens, **_options):
        self._note()
        return str(len(tokens))

    def _note(self) -> None:
        self.was_on_loop.append(threading.current_thread() is threading.main_thread())


def observed() -> dict[str, list[object]]:
    """By hook: what came of a long request, and whether it was prepared on the event loop's thread."""
    from fastapi import Response
    from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class Serving(OpenAIServingBase):
        def _request_id_prefix(self) -> str:
            return "x"

        def _validate_request(self, request):
            return "refused" if request.prompt == "refused" else None

        def _convert_to_internal_request(self, request, raw_request=None):
            if request.prompt == "wrong":
                raise ValueError("wrong")
            return self.tokenizer_manager.tokenizer.encode(request.prompt), request

        async def _handle_non_streaming_request(self, adapted_request, request, raw_request):
            return adapted_request

    def manager() -> SimpleNamespace:
        return SimpleNamespace(
            tokenizer=_Tokenizer(),
            async_dynamic_batch_tokenizer=None,
            model_config=SimpleNamespace(is_embedding_gemma=False),
            request_logger=SimpleNamespace(log_requests=False),
            server_args=None,
        )

    async def prepared() -> list[object]:
        serving = Serving(manager())
        answers = [
            await serving.handle_request(SimpleNamespace(prompt=prompt), RAW) for prompt in (LONG, "wrong", "refused")
        ]
        statuses = [answer if isinstance(answer, list) else answer.status_code for answer in answers]
        return [statuses, serving.tokenizer_manager.tokenizer.was_on_loop]

    async def tokenized() -> list[object]:
        of = manager()
        for name in ("_detect_input_format", "_prepare_tokenizer_input", "_extract_tokenizer_results"):
            setattr(of, name, getattr(TokenizerManager, name).__get__(of))
        ids, _ = await TokenizerManager._tokenize_texts(of, LONG)
        return [ids, of.tokenizer.was_on_loop]

    async def answered(kind, request) -> list[object]:
        serving = kind(manager())
        answer = await serving.handle_request(request, RAW)
        found = json.loads(answer.body) if isinstance(answer, Response) else answer.model_dump()
        said = [found.get("tokens") or found["text"], found.get("max_model_len")]
        return [said, serving.tokenizer_manager.tokenizer.was_on_loop]

    detokenize = DetokenizeRequest(model="m", tokens=[1] * 9)
    return {
        "long_requests_are_prepared_in_threads": [
            *asyncio.run(prepared()),
            *asyncio.run(answered(OpenAIServingTokenize, TokenizeRequest(model="m", prompt=LONG))),
            *asyncio.run(answered(OpenAIServingDetokenize, detokenize)),
        ],
        "long_texts_are_tokenized_in_threads": asyncio.run(tokenized()),
    }
