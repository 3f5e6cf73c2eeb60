"""Sessions of several turns. Earlier answers in a prompt are made up, so that every system gets the same bytes."""

from typing import Any

from bench.workloads.draws import Draws
from bench.workloads.lengths import scaled
from bench.workloads.session import CHAT, Request

_NUM_SYSTEM_PROMPTS = 8
_TEXT = (
    "the a of to and in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also well many must before back through years where much your way "
    "down should because long each just state those people too mister how little good world make very year still "
    "see work life being day water "
)
_WORDS = _TEXT.split()


def words(draws: Draws, count: int) -> str:
    """A text of so many common English words."""
    return " ".join(_WORDS[token] for token in draws.tokens(count, 0, len(_WORDS) - 1))


def chat(seed: int, session: int, adapter: int | None, scale: float = 1.0) -> list[Request]:
    """2 to 6 turns of 8 to 64 words, answers of 64 to 256 tokens; one of eight system prompts of 300 words.

    Users think for 2 s on average, at most 10 s. Sessions of one adapter share its system prompt. `scale` multiplies
    words and tokens.
    """
    draws = Draws(seed, "chat", session)
    which = draws.integer(0, _NUM_SYSTEM_PROMPTS - 1) if adapter is None else adapter % _NUM_SYSTEM_PROMPTS
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words(Draws(seed, "system prompt", which), scaled(300, scale))}
    ]
    requests = []
    for turn in range(draws.integer(2, 6)):
        pause_s = min(10.0, draws.exponential(2.0)) if turn else 0.0
        messages.append({"role": "user", "content": words(draws, scaled(draws.integer(8, 64), scale))})
        max_tokens = scaled(draws.integer(64, 256), scale)
        requests.append(Request(CHAT, {"messages": [*messages]}, max_tokens, pause_s))
        messages.append({"role": "assistant", "content": words(draws, max(1, max_tokens * 3 // 4))})
    return requests
