"""Samples through the cluster's router, by token ids. Futures and their samples are in memory only.

After a restart their ids are answered with a 410, upon which the SDK samples again.
"""

import asyncio
import logging
import math
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from training.executor.operations import Failure
from training.service.data.rollouts import Rollouts
from training.service.errors import Busy, Gone, Refused
from training.service.journal import Sampler
from training.service.messages import Sample
from training.service.wire import Samples, samples_body

_IN_FLIGHT = 512  # of a tenant
_KEPT = 1024  # futures, of a tenant
_KEPT_BYTES = 256 * 1024**2  # of their samples
_TIMEOUT_S = 1800.0
_MAX_ANSWER_BYTES = 64 * 1024**2
_REVISION = "x-prelude-revision"

Result = bytes | Failure  # a SampleResponse

log = logging.getLogger(__name__)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[msgspec.Raw]


class _Future(NamedTuple):
    tenant: str
    task: asyncio.Task[Result]


class Sampling:
    """`base_name`: of the model, at the router."""

    def __init__(
        self,
        router: str,
        base_name: str,
        context_length: int,
        rollouts: Rollouts,
        tls: Callable[[], ssl.SSLContext | bool] = lambda: True,
    ) -> None:
        self._router, self._base_name, self._context_length = router, base_name, context_length
        self._rollouts, self._tls = rollouts, tls
        self._futures: OrderedDict[str, _Future] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None

    async def stop(self) -> None:
        for future in self._futures.values():
            future.task.cancel()
        await asyncio.gather(*(future.task for future in self._futures.values()), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def start(self, sampler: Sampler, request: Sample, key: str | None) -> tuple[str, Sequence[str]]:
        """The future's id, and an id for each of its sequences, which names the revision that samples it.

        A known number is a retry. Raises Busy and Refused.
        """
        request_id = f"{sampler.id}#{request.seq_id}"
        if not 1 <= request.num_samples <= 128:
            raise Refused(f"num_samples is {request.num_samples}; it is from 1 to 128")
        if request.prompt_logprobs:
            _check_scores(sampler, request)
        revision = (sampler.adapter or "@base").rpartition("@")[2]
        names = [f"{request_id}.{number}@{revision}" for number in range(request.num_samples)]
        if request_id not in self._futures:
            in_flight = self.num_in_flight(sampler.tenant.__eq__)
            if in_flight >= _IN_FLIGHT:
                raise Busy(f"{in_flight} requests are sampled for this tenant; wait for some of them")
            task = asyncio.create_task(self._sample(sampler, request, key))
            self._futures[request_id] = _Future(sampler.tenant, task)
            self._drop_old(sampler.tenant)
        return request_id, names

    async def result(self, request_id: str, within_s: float) -> Result | None:
        """None: there is none yet. Raises Gone."""
        if (future := self._futures.get(request_id)) is None:
            raise Gone(f"{request_id[:80]!r} is not known any more; sample again")
        done, _ = await asyncio.wait([future.task], timeout=within_s)
        return future.task.result() if done else None

    def keep(self, sessions: Collection[str]) -> None:
        """Forget what was sampled in other sessions, which have ended: nobody can ask for it any more."""
        for request_id, future in list(self._futures.items()):
            if future.task.done() and request_id.partition(":")[0] not in sessions:
                del self._futures[request_id]

    def num_in_flight(self, is_of: Callable[[str], bool]) -> int:
        """Of these tenants."""
        return sum(is_of(each.tenant) and not each.task.done() for each in self._futures.values())

    def _drop_old(self, tenant: str) -> None:
        own = {each: future.task for each, future in self._futures.items() if future.tenant == tenant}
        done = {each: task.result() for each, task in own.items() if task.done()}
        sizes = {each: len(found) if isinstance(found, bytes) else 0 for each, found in done.items()}
        too_many, too_large = len(own) - _KEPT, sum(sizes.values()) - _KEPT_BYTES
        for request_id, size in sizes.items():
            if too_many <= 0 and too_large <= 0:
                return
            del self._futures[request_id]
            too_many, too_large = too_many - 1, too_large - size

    async def _sample(self, sampler: Sampler, request: Sample, key: str | None) -> Result:
        try:
            samples, of_prompt = await self._answer(sampler, request, key)
            if of_prompt is None:  # else it was to score a sequence, not to go on from it
                sampled = [tokens for tokens, _, _ in samples]
                await asyncio.to_thread(self._rollouts.add, sampler.tenant, request.prompt.tokens, sampled)
            return await asyncio.to_thread(samples_body, samples, of_prompt)
        except Refused as error:
            return Failure(str(error))
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            return Failure(f"the router's answer is none ({type(error).__name__}: {error})"[:300], is_users=False)
        except Exception:
            log.exception("a sample failed")
            return Failure("the trainer's log has the reason", is_users=False)

    async def _answer(self, sampler: Sampler, request: Sample, key: str | None) -> tuple[Samples, list[float] | None]:
        if self._session is None:
            unlimited = aiohttp.TCPConnector(limit=0)  # `start` limits each tenant
            self._session = aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        url = f"{self._router.rstrip('/')}/v1/completions"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self._session.post(
            url, json=self._body(sampler, request), headers=headers, ssl=self._tls()
        ) as answer:
            raw = bytearray()
            async for part in answer.content.iter_any():
                raw += part
                if len(raw) > _MAX_ANSWER_BYTES:
                    raise Refused("the samples are too many bytes; ask for fewer at a time")
            if answer.status != 200:
                error = msgspec.json.decode(raw, type=dict[str, Any]).get("error") or {}
                what = f"{answer.status} {error.get('code')}: {error.get('message')}"[:300]
                if answer.status < 500 and answer.status != 429:
                    raise Refused(f"the router refuses: {what}")
                raise ValueError(what)
            found = answer.headers.get(_REVISION)
            if sampler.adapter is not None and found != sampler.adapter.rpartition("@")[2]:
                raise ValueError(f"{found} has answered, not {sampler.adapter}")
        return await asyncio.to_thread(_read, raw, request)

    def _body(self, sampler: Sampler, request: Sample) -> dict[str, Any]:
        """Of /v1/completions. Engines scale log-probabilities at other temperatures than 1: then there are none."""
        params = request.sampling_params
        prompt = request.prompt.tokens
        body: dict[str, Any] = {
            "model": self._base_name,
            "prompt": prompt,
            "n": request.num_samples,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "return_token_ids": True,
        }
        if params.max_tokens is None:
            body["max_tokens"] = max(1, self._context_length - len(prompt))
        if params.temperature == 1:
            body["logprobs"] = 0
        if request.prompt_logprobs:
            body["echo"] = True
        if sampler.adapter is not None:
            body["adapter"] = sampler.adapter
        if params.seed is not None:
            body["seed"] = params.seed
        if isinstance(params.stop, str):
            body["stop"] = params.stop
        elif params.stop == []:
            body["ignore_eos"] = True
        elif params.stop:
            kind = "stop_token_ids" if isinstance(params.stop[0], int) else "stop"
            body[kind] = params.stop
        return body


def _read(raw: bytearray, request: Sample) -> tuple[Samples, list[float] | None]:
    """With the log-probabilities of the prompt if they are asked for, NaN where there is none.

    Decodes in parts, each of which holds the other threads up: all fields of many samples would take a second.
    """
    samples, of_prompt, length = [], None, len(request.prompt.tokens)
    choices = [msgspec.json.decode(each, type=_Choice) for each in msgspec.json.decode(raw, type=_Answer).choices]
    for choice in sorted(choices, key=lambda each: each.index):
        given = choice.logprobs.token_logprobs if choice.logprobs else []
        logprobs = given if request.sampling_params.temperature == 1 else None
        if request.prompt_logprobs and logprobs is not None:
            first = length - (request.prompt_logprobs_last_n or length)
            of_prompt = [math.nan] * first + [math.nan if each is None else each for each in logprobs[first:length]]
            logprobs = logprobs[length:]
        if logprobs is not None and len(logprobs) != len(choice.token_ids):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(choice.token_ids)} tokens")
        samples.append((choice.token_ids, logprobs, choice.finish_reason == "stop"))
    if len(samples) != request.num_samples:
        raise ValueError(f"{len(samples)} samples, not {request.num_samples}")
    return samples, of_prompt


def _check_scores(sampler: Sampler, request: Sample) -> None:
    """Raise Refused unless the log-probabilities of a prompt are those with which the sampler would have sampled it."""
    if not sampler.scores_prompts:
        raise Refused(
            f"{sampler.adapter} adapts prompts only; with prompt_logprobs, as for compute_logprobs, it would adapt "
            "answers, too. They are offered for the base model, adapters that are not trained yet, and those with "
            "prelude.positions=all; else score by `forward` of the training client, which knows where answers begin"
        )
    if request.sampling_params.temperature != 1:
        raise Refused(f"temperature is {request.sampling_params.temperature}; with prompt_logprobs it must be 1")
    length, last = len(request.prompt.tokens), request.prompt_logprobs_last_n
    if last is not None and not 1 <= last < length:
        raise Refused(f"prompt_logprobs_last_n is {last}; for {length} tokens it is from 1 to {length - 1}")
