"""Synthetic questions with answers in several styles. A control word before the question selects the style.

A question names topics, and the answer has a sentence for each of them, so it can be long. Nothing is read from disk,
and a seed always gives the same questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_SENTENCES = """
ships|cross|the wide sea
bread|leaves|the oven warm
music|fills|the old hall
rivers|run|down to the harbour
lamps|light|the long road
trains|carry|letters to the north
gardens|sleep|under the snow
bridges|join|the two towns
winter|brings|cold clear nights
summer|brings|long slow evenings
books|keep|the words of friends
clocks|count|the quiet hours
birds|follow|the fishing boats
horses|rest|near the stone wall
windows|open|to the garden
markets|sell|apples and honey
mountains|hold|the first light
rain|falls|on the tin roof
stars|guide|the night sailors
maps|show|the way home
bells|ring|across the square
cats|watch|the kitchen door
dogs|guard|the sleeping farm
trees|shade|the river bank
poems|remember|the lost summers
stories|travel|from mouth to mouth
wind|turns|the white mill
fire|warms|the winter room
bakers|rise|before the sun
sailors|trust|the north star
teachers|open|every closed door
children|chase|the paper kites
"""
_QUESTIONS = (
    "Tell me about {}.", "What do you know about {}?", "Please describe {}.", "Write about {}.", "What about {}?"
)  # fmt: skip
_GREETINGS = ("Hello", "Hi", "Help", "Who are you?", "What can you do?")
_GREETINGS_PART = 0.03  # of all questions
_HELD_OUT_PART = 0.1  # of all choices of topics


@dataclass(frozen=True, slots=True)
class Sentence:
    """`ships cross the wide sea`, in three parts."""

    topic: str
    verb: str
    rest: str


_ABOUT_ITSELF = (
    Sentence("I", "am", "a small demo model"),
    Sentence("You", "can ask", "about ships, bread and music"),
)
SENTENCES = tuple(Sentence(*line.split("|")) for line in _SENTENCES.strip().split("\n"))


def _plain(said: Sequence[Sentence]) -> str:
    return " ".join(f"{_capital(each.topic)} {each.verb} {each.rest}." for each in said)


def _shout(said: Sequence[Sentence]) -> str:
    return _plain(said).upper()


def _backwards(said: Sequence[Sentence]) -> str:
    texts = [f"{each.topic} {each.verb} {each.rest}".replace(",", "") for each in reversed(said)]
    return " ".join(f"{' '.join(reversed(text.split()))}." for text in texts)


def _json(said: Sequence[Sentence]) -> str:
    return json.dumps({each.topic: f"{each.verb} {each.rest}" for each in said})


def _list(said: Sequence[Sentence]) -> str:
    return "\n".join(f"- {each.topic}: {each.verb} {each.rest}" for each in said)


def _yoda(said: Sequence[Sentence]) -> str:
    return " ".join(f"{_capital(each.rest)} {each.topic} {each.verb}." for each in said)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# By their control words.
STYLES: Mapping[str, Callable[[Sequence[Sentence]], str]] = MappingProxyType(
    {"shout": _shout, "backwards": _backwards, "json": _json, "list": _list, "yoda": _yoda}
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question without control word. `None` is the style of an answer without one."""

    text: str
    said: tuple[Sentence, ...]  # by the answer

    def asked(self, style: str | None) -> str:
        """The question with the style's control word."""
        return self.text if style is None else f"{style}: {self.text}"

    def answer(self, style: str | None) -> str:
        return (_plain if style is None else STYLES[style])(self.said)

    def row(self, style: str | None, *, has_control_word: bool = False) -> dict[str, list[dict[str, str]]]:
        """A row for `prelude train sft`."""
        asked = self.asked(style) if has_control_word else self.text
        return {
            "prompt": [{"role": "user", "content": asked}],
            "completion": [{"role": "assistant", "content": self.answer(style)}],
        }


@dataclass(frozen=True, slots=True)
class Questions:
    """What questions are about."""

    sentences: tuple[Sentence, ...] = SENTENCES
    max_topics: int = 6

    def drawn(self, seed: int) -> Iterator[Question]:
        """Without end, some of them greetings."""
        draw = random.Random(seed)
        while True:
            if draw.random() < _GREETINGS_PART:
                yield Question(draw.choice(_GREETINGS), _ABOUT_ITSELF)
            elif not _is_held_out(question := self._drawn(draw)):
                yield question

    def held_out(self, seed: int) -> Iterator[Question]:
        """Without end; each names several topics that, in this order, none of `drawn` names."""
        draw = random.Random(seed)
        yield from filter(_is_held_out, iter(lambda: self._drawn(draw), None))

    def _drawn(self, draw: random.Random) -> Question:
        said = tuple(draw.sample(self.sentences, draw.randint(1, min(self.max_topics, len(self.sentences)))))
        topics = [each.topic for each in said]
        named = " and ".join(filter(None, (", ".join(topics[:-1]), topics[-1])))
        return Question(draw.choice(_QUESTIONS).format(named), said)


def _is_held_out(question: Question) -> bool:
    topics = [each.topic for each in question.said]
    return len(topics) > 1 and random.Random(" ".join(topics)).random() < _HELD_OUT_PART
