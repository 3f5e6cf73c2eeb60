"""How SGLang's own code answers with log-probabilities, for `hooks_in_action.py`: decoded how often, written where."""

from __future__ import annotations

import asyncio
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
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.openai import serving_completions
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
        CompletionResponse,
        CompletionResponseChoice,
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

    def answered(kind, *, num_tokens: int, logprobs, fails: bool = False) -> list[object]:
        """By whom the JSON is made, whether it is SGLang's, and in which threads its parts were made."""
        read_in: set[str] = set()
        is_chat = kind is OpenAIServingChat

        class Alternative(tuple):
            def __getitem__(self, place):
                read_in.add("the loop" if threading.current_thread() is threading.main_thread() else "a thread")
                return super().__getitem__(place)

        texts = ["中", " the", '"\\n', "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]
        tokens = [(-0.5 * n, n, texts[n % 4]) for n in range(num_tokens)]
        alternatives = [
            [Alternative((float("-inf") if k else -0.25 * n, k, f"{texts[n % 4]}{k}")) for k in range(3)]
            for n in range(num_tokens)
        ]
        meta = {"output_token_logprobs": tokens, "output_top_logprobs": alternatives if logprobs == 3 else None}
        item = {"meta_info": meta}
        serving = kind.__new__(kind)

        def built(*_arguments) -> object:
            usage = UsageInfo(total_tokens=num_tokens)
            if fails:
                return ORJSONResponse({"error": "broken"}, 500)
            if is_chat:
                values = serving._process_response_logprobs(item) if logprobs else None
                choice = ChatCompletionResponseChoice(
                    index=0, message=ChatMessage(role="assistant", content="中"), logprobs=values
                )
                return ChatCompletionResponse(id="x", model="m", created=1, choices=[choice], usage=usage)
            made = serving_completions.to_openai_style_logprobs
            values = made(input_token_logprobs=tokens[:1], input_top_logprobs=[None], **meta) if logprobs else None
            given = CompletionResponseChoice(index=0, text="中", logprobs=values)
            return CompletionResponse(id="x", model="m", created=1, choices=[given], usage=usage)

        async def generate(*_arguments):
            yield item

        expected = built()
        read_in.clear()
        serving.tokenizer_manager = SimpleNamespace(generate_request=generate)
        setattr(serving, "_build_chat_response" if is_chat else "_build_completion_response", built)
        asked = SimpleNamespace(logprobs=logprobs)
        found = asyncio.run(serving._handle_non_streaming_request(None, asked, None))
        if not hasattr(expected, "model_dump_json"):
            return ["an error" if found.status_code == 500 else "no error"]
        by_hand = hasattr(found, "body")
        body = found.body if by_hand else found.model_dump_json(by_alias=True).encode()
        is_equal = body == expected.model_dump_json(by_alias=True).encode()
        return ["a hook" if by_hand else "FastAPI", is_equal, *sorted(read_in)]

    def all_of(kind) -> list[object]:
        return [
            answered(kind, num_tokens=3000, logprobs=3),
            answered(kind, num_tokens=3000, logprobs=True),
            answered(kind, num_tokens=3000, logprobs=None),
            answered(kind, num_tokens=20, logprobs=3),
            answered(kind, num_tokens=3000, logprobs=3, fails=True),
        ]

    chats, completions = all_of(OpenAIServingChat), all_of(OpenAIServingCompletion)
    return {
        "tokens_are_decoded_once": decoded_once(),
        "positions_are_decoded_at_once": decoded_together(),
        "completions_are_written_in_threads": [each[:2] for each in completions],
        "chats_are_written_in_threads": [each[:2] for each in chats],
        "log_probabilities_of_completions_are_left_out": completions[0][2:],
        "log_probabilities_of_chats_are_left_out": chats[0][2:],
    }
