"""Clients of the systems that the adapter-tax benchmark compares. Every answer is checked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from bench.errors import SystemFailed, WrongAnswer

SYSTEMS = ("none", "stock", "unified_lora", "unified_direft", "pd")
HAVE_BASELINE = ("none", "pd")  # measured with requests for the base model, too


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `adapter` counts from 0; None is the base model."""

    prompt: Sequence[int]
    adapter: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens; empty unless requested
    num_cached_tokens: int  # of the prompt, found in the prefix cache


class System(Protocol):
    """One system under load."""

    @property
    def name(self) -> str: ...

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        """Generate `num_tokens` tokens. Raises SystemFailed or WrongAnswer."""


@dataclass(frozen=True, slots=True)
class OneEngine:
    """One engine, called directly. Without revisions, requests for adapters go to the base model."""

    name: str
    session: aiohttp.ClientSession
    url: str
    revisions: Sequence[str]

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        body = completion(request, num_tokens, with_logprobs)
        if self.revisions and request.adapter is not None:
            body["lora_path"] = self.revisions[request.adapter]
        return await _complete(self.session, self.url, body)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, both called directly, as the router calls them. Decode gives the answer."""

    name: str
    session: aiohttp.ClientSession
    prefill_url: str
    decode_url: str
    kv_host: str
    kv_bootstrap_port: int
    revisions: Sequence[str]
    decode_has_adapters: bool = False  # as stock SGLang's

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        decode_body = completion(request, num_tokens, with_logprobs) | {
            "bootstrap_host": self.kv_host,
            "bootstrap_port": self.kv_bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        prefill_body = dict(decode_body)
        if request.adapter is not None:
            prefill_body["lora_path"] = self.revisions[request.adapter]
            if self.decode_has_adapters:
                decode_body = prefill_body
        prefill = asyncio.create_task(_post(self.session, self.prefill_url, prefill_body), name="prefill call")
        try:
            answer = await _complete(self.session, self.decode_url, decode_body)
            await prefill
        finally:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
        return answer


@dataclass(frozen=True, slots=True)
class ThroughRouter:
    """A whole cluster behind its router."""

    name: str
    session: aiohttp.ClientSession
    url: str
    adapters: Sequence[str]  # their names

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        body = completion(request, num_tokens, with_logprobs)
        if request.adapter is not None:
            body["adapter"] = self.adapters[request.adapter]
        return await _complete(self.session, self.url, body)


def completion(request: Request, num_tokens: int, with_logprobs: bool) -> dict[str, Any]:
    """The body of a request for the base model."""
    return {
        **({"logprobs": 1} if with_logprobs else {}),
        "model": "bench",
        "prompt": list(request.prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    return checked(await _post(session, url, body), len(body["prompt"]), body["max_tokens"])


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemFailed(f"{url} answered {answer.status}: {(await answer.text())[:500]}")
            return await answer.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemFailed(f"{url}: {error or type(error).__name__}") from error


def checked(answer: dict[str, Any], prompt_tokens: int, generated_tokens: int) -> Answer:
    """The answer, if it has the requested length. Raises WrongAnswer."""
    usage = answer.get("usage") or {}
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if found != (prompt_tokens, generated_tokens):
        raise WrongAnswer(
            f"asked for {generated_tokens} tokens after {prompt_tokens}, got {found[1]} after {found[0]}: "
            f"{str(answer)[:300]}"
        )
    details = usage.get("prompt_tokens_details") or {}
    tokens = answer["choices"][0].get("token_ids") or ()
    if len(tokens) != generated_tokens:
        raise WrongAnswer(f"asked for {generated_tokens} tokens, got the ids of {len(tokens)}")
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or ()
    return Answer(tuple(tokens), tuple(logprobs), details.get("cached_tokens") or 0)
