"""How SGLang's own code answers with log-probabilities, for `hooks_in_action.py`: decoded how often, written where."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace


class _Tokenizer:
    """Counts the tokens that it decodes, and the calls."""

    def __init__(self) -> None:
        self.num_tokens = self.num_calls = 0

    def batch_decode(self, sequences):
        self.num_calls += 1
        self.num_tokens += len(sequences)
        return [f"t{token_id}" for [token_id] in sequences]


def observed() -> dict[str, list[object]]:
    """By hook: what was answered, and what it took."""
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionResponse,
        CompletionResponse,
        CompletionResponseChoice,
        LogProbs,
        UsageInfo,
    )
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    def manager() -> TokenizerManager:
        made = TokenizerManager.__new__(TokenizerManager)
        made.tokenizer = _Tokenizer()
        return made

    def decoded_once() -> list[object]:
        of = manager()
        found = [of.detokenize_logprob_tokens([-1.0, -2.0, -3.0], [5, 6, 5], True) for _ in range(2)]
        bare = of.detokenize_logprob_tokens([-1.0], [5], False)
        return [found[0] == found[1], found[1], bare, of.tokenizer.num_tokens]

    def decoded_together() -> list[object]:
        of = manager()
        values, token_ids = [None, [-1.0, -2.0], [], [-3.0]], [None, [5, 6], [], [5]]
        found = of.detokenize_top_logprobs_tokens(values, token_ids, True)
        nothing = of.detokenize_top_logprobs_tokens([None, []], [None, []], True)
        return [found, nothing, of.tokenizer.num_calls]

    class Noting(CompletionResponse):
        def model_dump_json(self, **options) -> str:
            written.append(threading.current_thread() is threading.main_thread())
            return super().model_dump_json(**options)

    class NotingChat(ChatCompletionResponse):
        def model_dump_json(self, **options) -> str:
            written.append(threading.current_thread() is threading.main_thread())
            return super().model_dump_json(**options)

    written: list[bool] = []
    values = LogProbs(tokens=["中"], token_logprobs=[-0.5], text_offset=[-1], top_logprobs=[{"中": float("-inf")}])
    choice = CompletionResponseChoice(index=0, text="中", logprobs=values)

    async def answered(kind, build: str, answer, logprobs) -> object:
        async def generate(*_arguments):
            yield {}

        serving = kind.__new__(kind)
        serving.tokenizer_manager = SimpleNamespace(generate_request=generate)
        setattr(serving, build, lambda *_arguments: answer)
        found = await serving._handle_non_streaming_request(None, SimpleNamespace(logprobs=logprobs), None)
        return json.loads(found.body)["choices"] if hasattr(found, "body") else "left to FastAPI"

    def completion(logprobs, num_tokens: int) -> object:
        usage = UsageInfo(total_tokens=num_tokens)
        answer = Noting(id="x", model="m", choices=[choice], usage=usage)
        return asyncio.run(answered(OpenAIServingCompletion, "_build_completion_response", answer, logprobs))

    def chat(logprobs, num_tokens: int) -> object:
        answer = NotingChat(id="x", model="m", choices=[], usage=UsageInfo(total_tokens=num_tokens))
        return asyncio.run(answered(OpenAIServingChat, "_build_chat_response", answer, logprobs))

    return {
        "tokens_are_decoded_once": decoded_once(),
        "positions_are_decoded_at_once": decoded_together(),
        "completions_are_written_in_threads": [
            completion(1, 16000), completion(None, 16000), completion(1, 3), written.copy()
        ],
        "chats_are_written_in_threads": [written.clear(), chat(True, 16000), chat(False, 16000), written],
    }  # fmt: skip
