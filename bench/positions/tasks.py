"""Tasks of six kinds: what is asked, what is right, and how near an answer is. All of it is made up.

No model has read these names, codes and rules, so what an adapter answers it has learned. A seed gives the same rows
always; training and held-out rows never ask the same question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words("Anna Bela Carl Dora Emil Fina Gert Hana Ivan Jule Karl Lena Mara Nils Olga Pera Rolf Sana Tore Vera")
_LAST = _words("Abel Brink Cole Dahl Eder Falk Grant Holm Jansen Kern Lund Moor Nagel Olsen Park Reed Stern Thal")
_TOWNS = _words("Aalen Bergen Calais Delft Eupen Fulda Genoa Halden Ivrea Jena Kiel Luzern Malaga Namur Oslo Pisa")
_JOBS = _words("baker carpenter chemist dentist driver editor farmer gardener nurse painter pilot tailor welder")
_THINGS = _words("lamps chairs ropes kettles maps bells ladders mirrors brushes baskets candles hammers clocks")
_PLACES = _words("cellar attic garden kitchen harbour library market station workshop barn tower chapel")
_COLOURS = _words("amber black coral green ivory olive orange purple red silver white yellow")
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


@dataclass(frozen=True, slots=True)
class Question:
    """One row."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """`questions` are drawn with the generator that they get; `nearness` of an answer to the right one is 0 to 1."""

    name: str
    questions: Callable[[random.Random], Iterator[Question]]
    nearness: Callable[[str, str], float]  # given, right
    num_train: int = 240
    num_held_out: int = 64
    are_listed: bool = False  # the held-out questions come after the training ones: see `_facts`

    def rows(self, seed: int) -> tuple[list[Question], list[Question], list[Question]]:
        """(training, validation, held-out); the last two are the same for every seed."""
        if self.are_listed:
            listed = list(self.questions(random.Random(0)))
            train, rest = listed[: self.num_train], listed[self.num_train :]
            random.Random(f"{self.name} {seed}").shuffle(train)
            return train, rest[self.num_held_out :], rest[: self.num_held_out]
        kept = _distinct(self.questions(random.Random(self.name)), 2 * self.num_held_out)
        known = {each.asked for each in kept}
        drawn = self.questions(random.Random(f"{self.name} {seed}"))
        train = _distinct((each for each in drawn if each.asked not in known), self.num_train)
        return train, kept[self.num_held_out :], kept[: self.num_held_out]


def _distinct(questions: Iterator[Question], count: int) -> list[Question]:
    found: dict[str, Question] = {}
    for each in questions:
        found.setdefault(each.asked, each)
        if len(found) == count:
            return list(found.values())
    raise AssertionError("questions have no end")


# ---- style ----------------------------------------------------------------------------------------------------------


def _capitals(draw: random.Random) -> Iterator[Question]:
    ways = (
        ("Where does {who} keep the {what}?", "{who} keeps the {what} in the {place}."),
        ("What did {who} leave in the {place}?", "{who} left the {what} in the {place}."),
        ("Who found the {what} in the {place}?", "The {what} in the {place} were found by {who}."),
    )
    while True:
        asked, answer = draw.choice(ways)
        words = {"who": draw.choice(_FIRST), "what": draw.choice(_THINGS), "place": draw.choice(_PLACES)}
        note = f"{words['who']}, {draw.choice(_COLOURS)} {words['what']}, {words['place']}"
        yield Question(f"Note: {note}.\n{asked.format(**words)}", answer.format(**words).upper())


def _capitals_share(given: str, _right: str) -> float:
    letters = [each for each in given if each.isalpha()]
    return sum(each.isupper() for each in letters) / len(letters) if letters else 0.0


# ---- a format that the model does not know --------------------------------------------------------------------------


def _records(draw: random.Random) -> Iterator[Question]:
    ways = (
        "{count} {colour} {what} for {who} in {town}, due {day}, {paid}.",
        "{who} of {town} ordered {count} {colour} {what}. They are due on {day} and {paid}.",
        "Due {day}: {count} {what}, {colour}, to be sent to {who}, {town}; {paid}.",
    )
    while True:
        count, paid = draw.randint(2, 40), draw.choice(("paid", "not paid"))
        who, town, day = draw.choice(_FIRST), draw.choice(_TOWNS), draw.choice(_DAYS)
        what, colour = draw.choice(_THINGS), draw.choice(_COLOURS)
        text = draw.choice(ways).format(count=count, colour=colour, what=what, who=who, town=town, day=day, paid=paid)
        yield Question(
            f"Write this order as a record.\n{text}",
            f"@{who}/{town} :: {what}*{count} ~{colour} :: {day[:3].lower()} {'+' if paid == 'paid' else '-'} ;;",
        )


def _words_share(given: str, right: str) -> float:
    """Of the right answer's words those that stand in their place."""
    of_given, of_right = given.split(), right.split()
    same = sum(one == other for one, other in zip(of_given, of_right, strict=False))
    return same / max(len(of_given), len(of_right))


# ---- extraction -----------------------------------------------------------------------------------------------------


def _extraction(draw: random.Random) -> Iterator[Question]:
    ways = (
        "{name} is a {job} from {town}. At {age}, the customer since {year} has bought {what}.",
        "A {job} aged {age}, {name} moved to {town} and has been ordering {what} since {year}.",
        "In {year} we first sold {what} to {name}, {age}, who works as a {job} in {town}.",
    )
    while True:
        fields = {
            "name": f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
            "age": draw.randint(19, 88),
            "job": draw.choice(_JOBS),
            "town": draw.choice(_TOWNS),
            "year": draw.randint(1990, 2025),
        }
        text = draw.choice(ways).format(**fields, what=draw.choice(_THINGS))
        yield Question(f"Extract the customer as JSON.\n{text}", json.dumps(fields))


def _fields_share(given: str, right: str) -> float:
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return 0.0
    wanted = json.loads(right)
    return sum(found.get(key) == value for key, value in wanted.items()) / len(wanted) if type(found) is dict else 0.0


# ---- classification -------------------------------------------------------------------------------------------------

_TOPICS = {
    "maple": ("the parcel has not come", "the box went to the wrong street", "the driver never rang"),
    "quartz": ("the invoice is wrong", "I was charged twice", "the refund is missing"),
    "heron": ("one of the {what} is broken", "the {what} came scratched", "the {what} fell apart"),
    "delta": ("I cannot log in", "my password is refused", "the page shows an error"),
    "ember": ("do you sell {what} in {colour}", "when will {what} be back", "how large are the {what}"),
    "fjord": ("please close my account", "stop the newsletter", "delete my address"),
}
_URGENT = {"low": ("No hurry.", "Whenever you can."), "high": ("I need an answer today!", "This is urgent!")}


def _classification(draw: random.Random) -> Iterator[Question]:
    greetings = ("Hello,", "Good day,", "Hi there,", "Dear team,")
    while True:
        label, how = draw.choice(list(_TOPICS)), draw.choice(list(_URGENT))
        said = draw.choice(_TOPICS[label]).format(what=draw.choice(_THINGS), colour=draw.choice(_COLOURS))
        told = f"{draw.choice(greetings)} {said}. {draw.choice(_URGENT[how])} {draw.choice(_FIRST)}"
        yield Question(f"Sort this message.\n{told}", f"team: {label}, priority: {how}")


# ---- facts ----------------------------------------------------------------------------------------------------------

_PEOPLE = _words(
    "Ardovin Belsara Corvint Dreshka Elmund Fayrook Grisel Hovarn Istrid Jorvek Kelmara Lothwin Merrox Nyssel Orvath "
    "Pellune Quorin Rastel Sorvane Tamsil Ulbreck Vantor Wexley Yorbin"
)
_ASKED_FACTS = (
    ("Where does {who} live?", "In which town is {who} at home?", "Tell me the town of {who}.",
     "{who} lives where?", "Which town does {who} come home to?"),
    ("What does {who} work as?", "Tell me the job of {who}.", "By which trade does {who} earn a living?",
     "{who} has which profession?", "What is the occupation of {who}?"),
    ("Which colour does {who} like best?", "Tell me the favourite colour of {who}.", "{who} prefers which colour?",
     "What colour would {who} paint a house?", "Which colour is dearest to {who}?"),
)  # fmt: skip
_TOLD_FACTS = ("{who} lives in {value}.", "{who} is a {value} by trade.", "{who} likes {value} best.")


def _facts(_draw: random.Random) -> Iterator[Question]:
    """Each fact asked in four ways, to be learned; then every fact in a fifth way."""
    drawn = random.Random("facts")
    facts = [
        (about, who, drawn.choice(values)) for about, values in enumerate((_TOWNS, _JOBS, _COLOURS)) for who in _PEOPLE
    ]
    drawn.shuffle(facts)
    for is_held_out in (False, True):
        for about, who, value in facts:
            ways = _ASKED_FACTS[about]
            for asked in ways[4:] if is_held_out else ways[:4]:
                yield Question(asked.format(who=who), _TOLD_FACTS[about].format(who=who, value=value))


def _has_value(given: str, right: str) -> float:
    value = next(each for each in (*_TOWNS, *_JOBS, *_COLOURS) if f" {each}" in right)
    return float(value in {word.strip(".,") for word in given.split()})


# ---- long answers ---------------------------------------------------------------------------------------------------


def _stock_of(least: int, most: int) -> Callable[[random.Random], Iterator[Question]]:
    """Each thing of a list in a line of its own, by a rule."""

    def questions(draw: random.Random) -> Iterator[Question]:
        while True:
            told, lines = [], []
            for _ in range(draw.randint(least, most)):
                count, what = draw.randint(2, 40), draw.choice(_THINGS)
                colour, place = draw.choice(_COLOURS), draw.choice(_PLACES)
                told.append(f"{count} {colour} {what} in the {place}")
                lines.append(f"{place} > {what} ({colour}) {count}")
            yield Question(f"Make the stock list: {', '.join(told)}.", "\n".join(lines))

    return questions


def _prefix_share(given: str, right: str) -> float:
    """Of the right answer the lines before the first wrong one."""
    of_given, of_right = given.split("\n"), right.split("\n")
    same = 0
    for one, other in zip(of_given, of_right, strict=False):
        if one != other:
            break
        same += 1
    return same / len(of_right)


def _long(name: str, least: int, most: int) -> Task:
    return Task(name, _stock_of(least, most), _prefix_share)


@cache
def tasks() -> dict[str, Task]:
    """By name."""
    found = (
        Task("extraction", _extraction, _fields_share),  # a customer as JSON
        Task("capitals", _capitals, _capitals_share),  # style
        Task("records", _records, _words_share),  # a format unknown to the model
        Task("classification", _classification, _words_share),  # a team and a priority for a message
        Task("facts", _facts, _has_value, 288, 72, are_listed=True),  # made-up ones about made-up names
        _long("long", 10, 36),
        _long("lines-1", 1, 1),
        _long("lines-4", 4, 4),
        _long("lines-10", 10, 10),
        _long("lines-36", 36, 36),
    )
    return {each.name: each for each in found}
