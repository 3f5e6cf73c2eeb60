"""Evaluates a running cluster on held-out rows: each prompt is a request to its HTTP API (docs/api.md).

Answers come back as token ids, so they are compared token for token, as offline evaluation does. What needs the weights
is not known here: a prefill-only adapter's loss, because a server would read the scored answer as prompt, adapted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from training.data.prompts import Prompt
from training.errors import ClusterRefused, OptionInvalid
from training.runs.evaluation import NO_ADAPTER, AnsweredTurn, shown_text
from training.runs.router_answers import address, error_of, reason

_GIVE_UP_AFTER = 20  # failed prompts in a row
_MAX_ANSWER_BYTES = 16 * 1024**2
_RETRIED = (429, 503)  # with Retry-After: the cluster asks for it
_RETRY_AFTER_S = (0.1, 10.0)  # at least and at most
_MODELS_WITHIN_S = 30.0
# A model's generation_config.json has defaults, which engines apply; the reference is greedy and nothing else.
_GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True}
_Shown = Callable[[Sequence[int]], str]  # an answer as text


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One prompt."""

    where: str  # file and row
    expected: str
    given: str | None  # at most as many tokens as are expected; None: no answer, see `error`
    is_exact: bool  # token for token, the end included
    num_tokens: int  # of the expected answer
    revision: str | None  # that answered, of an adapter
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServedEvaluation:
    """One adapter, or the base model, on all prompts."""

    name: str
    turns: tuple[ServedTurn, ...]

    @property
    def exact_match(self) -> float:
        """The part of the prompts whose answer is exactly the expected one; a prompt without an answer is not."""
        return sum(turn.is_exact for turn in self.turns) / len(self.turns)

    @property
    def failed(self) -> tuple[ServedTurn, ...]:
        """Prompts without an answer."""
        return tuple(turn for turn in self.turns if turn.error is not None)

    @property
    def revisions(self) -> tuple[str, ...]:
        """That answered; several if an alias moved meanwhile."""
        return tuple(dict.fromkeys(turn.revision for turn in self.turns if turn.revision))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where to ask, and how much at once. Raises OptionInvalid."""

    url: str  # of the router
    key: str | None = field(default=None, repr=False)  # an API key that may ask for completions
    concurrency: int = 8
    timeout_s: float = 120.0  # of a prompt, its retries included

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise OptionInvalid(f"the URL is {self.url!r}; a router's is like http://127.0.0.1:8000")
        if self.concurrency < 1 or not self.timeout_s > 0:
            raise OptionInvalid(
                f"{self.concurrency} prompts at once, {self.timeout_s:g} s for each; both must be positive"
            )

    def evaluate(
        self, tokenizer: Any, ends: Iterable[int], prompts: Sequence[Prompt], adapters: Sequence[str | None]
    ) -> list[ServedEvaluation]:
        """Ask every prompt of each adapter (None: the base model). Blocking.

        `ends` are end-of-sequence ids besides the tokenizer's. Prompts that fail are in the result. Raises
        ClusterRefused for what every prompt would fail with: a wrong URL or key, an adapter that the cluster does not
        have.
        """
        return asyncio.run(self._evaluate(partial(shown_text, tokenizer, ends=frozenset(ends)), prompts, adapters))

    async def _evaluate(
        self, shown: _Shown, prompts: Sequence[Prompt], adapters: Sequence[str | None]
    ) -> list[ServedEvaluation]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        no_timeout = aiohttp.ClientTimeout()  # each request has a deadline of its own
        connector = aiohttp.TCPConnector(limit=0)  # `concurrency` is the limit
        async with aiohttp.ClientSession(connector=connector, timeout=no_timeout, headers=headers) as session:
            asked = _Asked(self, session, shown, await self._base_model(session))
            for adapter in adapters:  # a name that is refused is told before the others have taken their time
                await asked.answer(prompts[0], adapter)
            return [
                ServedEvaluation(adapter or NO_ADAPTER, await asked.answers(prompts, adapter)) for adapter in adapters
            ]

    async def _base_model(self, session: aiohttp.ClientSession) -> str:
        try:
            async with asyncio.timeout(_MODELS_WITHIN_S), session.get(address(self.url, "/v1/models")) as answer:
                body = await _json_of(answer)
                self.check(answer.status, body, "/v1/models", None)
                names = [each["id"] for each in body["data"] if not each.get("parent")]
                return str(names[0])
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            raise ClusterRefused(
                f"{self.url} cannot be reached ({error or type(error).__name__}); is the router running there? "
                "`prelude up` prints its address"
            ) from error
        except (LookupError, TypeError, AttributeError, _NoAnswer) as error:
            raise ClusterRefused(f"{self.url}/v1/models is no list of models; {_ADDRESS_REMEDY}") from error

    def check(self, status: int, body: Any, path: str, adapter: str | None) -> None:
        """Raises ClusterRefused for an answer that every other prompt would get, too."""
        said = f"{status} {reason(body)}"
        code = error_of(body).get("code")
        if status in (401, 403):
            had = "without a key" if self.key is None else "with this key"
            raise ClusterRefused(
                f"{self.url} refuses requests {had} ({said}); put a key that may use the models into PRELUDE_API_KEY"
            )
        if code in _NOT_SERVED or (status in (404, 410) and code not in _NO_SUCH_PATH):
            raise ClusterRefused(
                f"{self.url} does not serve {adapter or 'its base model'} ({said}); {self.url}/v1/models has the "
                "names, --adapter takes those"
            )
        if status in (404, 405) or (path == "/v1/models" and status != 200):
            raise ClusterRefused(f"{self.url} answers {path} with {said}; {_ADDRESS_REMEDY}")


_NOT_SERVED = ("unified_worker_needed",)  # beside the codes of 404 and 410, which say what of a name is unknown
_NO_SUCH_PATH = (None, "unknown_path", "not_offered")
_ADDRESS_REMEDY = "is it a router of Prelude? `prelude up` prints its address"


@dataclass(frozen=True, slots=True)
class _Asked:
    """One session with a cluster."""

    cluster: Cluster
    session: aiohttp.ClientSession
    shown: _Shown
    model: str

    async def answers(self, prompts: Sequence[Prompt], adapter: str | None) -> tuple[ServedTurn, ...]:
        """In the prompts' order, `concurrency` at once. Ends early where nothing succeeds any more."""
        found: dict[int, ServedTurn] = {}
        waiting = iter(enumerate(prompts))
        failures = _FailuresInARow()

        async def ask_on() -> None:
            for number, prompt in waiting:
                if failures.are_too_many:
                    found[number] = self._failed(prompt, f"not asked: {_GIVE_UP_AFTER} prompts in a row had failed")
                    continue
                found[number] = await self.answer(prompt, adapter)
                failures.count(found[number].error is not None)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.cluster.concurrency):
                    group.create_task(ask_on(), name=f"evaluation {number}")
        except ExceptionGroup as errors:  # the same refusal, of one or more
            raise errors.exceptions[0] from None
        return tuple(found[number] for number in range(len(prompts)))

    async def answer(self, prompt: Prompt, adapter: str | None) -> ServedTurn:
        """What the cluster answers, or why it does not. Raises ClusterRefused."""
        try:
            async with asyncio.timeout(self.cluster.timeout_s):
                return self._judged(prompt, *await self._exchange(prompt, adapter))
        except TimeoutError:
            return self._failed(prompt, f"no answer within {self.cluster.timeout_s:g} s")
        except (OSError, aiohttp.ClientError) as error:
            return self._failed(prompt, str(error) or type(error).__name__)
        except _NoAnswer as error:
            return self._failed(prompt, str(error))

    async def _exchange(self, prompt: Prompt, adapter: str | None) -> tuple[Any, str | None]:
        """(choice, revision)"""
        body = {**_GREEDY, **prompt.fields, "model": self.model, "max_tokens": len(prompt.turn.answers[0])}
        if adapter is not None:
            body["adapter"] = adapter
        while True:
            async with self.session.post(address(self.cluster.url, prompt.path), json=body) as answer:
                parsed = await _json_of(answer)
                wait_s = _retry_after_s(answer)
            self.cluster.check(answer.status, parsed, prompt.path, adapter)
            if answer.status == 200:
                break
            if wait_s is None:
                raise _NoAnswer(f"{answer.status} {reason(parsed)}")
            await asyncio.sleep(wait_s)  # the caller's deadline bounds it
        try:
            return parsed["choices"][0], answer.headers.get("x-prelude-revision")
        except (LookupError, TypeError) as error:
            raise _NoAnswer(f"an answer without choices: {str(parsed)[:100]}") from error

    def _judged(self, prompt: Prompt, choice: Any, revision: str | None) -> ServedTurn:
        given, read = _ids(choice, "token_ids"), _ids(choice, "prompt_token_ids")
        if read != list(prompt.turn.context):
            raise _NoAnswer(
                f"the worker read a prompt of {len(read)} tokens, not the {len(prompt.turn.context)} of training; is "
                "--model the directory that the cluster serves, with its chat template?"
            )
        return ServedTurn(
            where=prompt.where,
            expected=self.shown(prompt.turn.answers[0]),
            given=self.shown(given),
            is_exact=given == list(prompt.turn.answers[0]),
            num_tokens=len(prompt.turn.answers[0]),
            revision=revision,
        )

    def _failed(self, prompt: Prompt, error: str) -> ServedTurn:
        expected = prompt.turn.answers[0]
        return ServedTurn(prompt.where, self.shown(expected), None, False, len(expected), None, error[:500])


class _NoAnswer(Exception):
    """One prompt failed; the message says how."""


class _FailuresInARow:
    """Of prompts, in the order in which they end."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def are_too_many(self) -> bool:
        return self._count >= _GIVE_UP_AFTER

    def count(self, has_failed: bool) -> None:
        self._count = self._count + 1 if has_failed else 0


def differing(
    served: Iterable[ServedTurn], offline: Iterable[AnsweredTurn]
) -> Iterator[tuple[ServedTurn, AnsweredTurn]]:
    """Of the same prompts in the same order: those that are answered differently, or by one side only."""
    for one, other in zip(served, offline, strict=True):
        if (one.given, one.is_exact) != (other.given, other.is_exact):
            yield one, other


async def _json_of(answer: aiohttp.ClientResponse) -> Any:
    """The body; text, shortened, if it is no JSON."""
    try:
        await answer.content.readexactly(_MAX_ANSWER_BYTES)
    except asyncio.IncompleteReadError as whole:
        try:
            return json.loads(whole.partial)
        except (ValueError, RecursionError):
            return whole.partial[:200].decode(errors="replace")
    raise _NoAnswer(f"an answer of over {_MAX_ANSWER_BYTES} bytes")


def _retry_after_s(answer: aiohttp.ClientResponse) -> float | None:
    if answer.status not in _RETRIED:
        return None
    try:
        asked_s = int(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    least_s, most_s = _RETRY_AFTER_S
    return min(max(asked_s, least_s), most_s)


def _ids(choice: Any, name: str) -> list[int]:
    ids = choice.get(name) if isinstance(choice, dict) else None
    if not isinstance(ids, list):
        raise _NoAnswer(f"an answer without {name}; {_ADDRESS_REMEDY}")
    return ids
