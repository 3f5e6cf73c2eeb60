"""Pushes a checkpoint into a running cluster: `POST /v1/adapters/{name}/push` (docs/api.md)."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from training.errors import FolderNotSeen, OptionInvalid, PushFailed

_SUFFIXES = (".json", ".safetensors")  # what an upload may have
_CHECK_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PushTarget:
    """An adapter of a cluster. Its alias moves to what is pushed once workers have loaded it. Raises OptionInvalid."""

    url: str  # of the router
    name: str
    key: str | None = field(default=None, repr=False)  # an API key that may manage the adapter
    alias: str = "latest"
    timeout_s: float = 300.0  # for upload and loading
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # more, as of a trainer
    memory_only: bool = False  # no store and no disk of the cluster gets it
    by_folder: bool = False  # a router of this host reads the files itself
    tls: Callable[[], ssl.SSLContext | bool] = lambda: True  # with what a router's certificate is checked

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise OptionInvalid(f"the router's URL is {self.url!r}; it is like http://127.0.0.1:8000")

    def push(self, folder: Path) -> dict[str, Any]:
        """Push the adapter's files in the folder; returns the router's answer. Blocking. Raises PushFailed."""
        return self._asked(self._push(folder), f"taken {self.name}", self.timeout_s)

    def check(self) -> None:
        """Raise PushFailed unless the router answers, has management and accepts the key. Pushes nothing. Blocking."""
        self._asked(self._check(), "answered", _CHECK_S)

    def remove_alias(self) -> None:
        """Remove the alias, or find that it is gone. Blocking. Raises PushFailed."""
        self._asked(self._remove_alias(), f"removed {self.alias}", _CHECK_S)

    def _asked(self, call: Coroutine[Any, Any, T], what: str, within_s: float) -> T:
        try:
            return asyncio.run(asyncio.wait_for(call, within_s))
        except TimeoutError:
            raise PushFailed(f"{self.url} has not {what} within {within_s:g} s") from None
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise PushFailed(f"{self.url} cannot be pushed to: {error or type(error).__name__}") from error

    async def _check(self) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._base}/v1/adapters?limit=1", headers=self._headers, ssl=self.tls()) as answer,
        ):
            if answer.status != 200:
                reason = _reason(await answer.json(content_type=None))
                raise PushFailed(f"{self.url} lists no adapters, so none can be pushed: {answer.status} {reason}")

    async def _remove_alias(self) -> None:
        url = f"{self._base}/v1/adapters/{quote(self.name)}/aliases/{self.alias}"
        async with (
            aiohttp.ClientSession() as session,
            session.delete(url, headers=self._headers, ssl=self.tls()) as answer,
        ):
            if answer.status != 200 and "adapter_not_found" not in (
                reason := _reason(await answer.json(content_type=None))
            ):
                raise PushFailed(f"{self.url} does not remove {self.name}@{self.alias}: {answer.status} {reason}")

    @property
    def _base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients have it

    @property
    def _headers(self) -> dict[str, str]:
        return {**self.headers, **({} if self.key is None else {"Authorization": f"Bearer {self.key}"})}

    async def _push(self, folder: Path) -> dict[str, Any]:
        form = aiohttp.FormData(quote_fields=False, default_to_multipart=True)
        form.add_field("alias", self.alias)
        if self.memory_only:
            form.add_field("memory_only", "true")
        if self.by_folder:
            form.add_field("folder", str(folder))
        url = f"{self._base}/v1/adapters/{quote(self.name)}/push"
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        with contextlib.ExitStack() as opened:
            for path in [] if self.by_folder else _files(folder):
                file = opened.enter_context(path.open("rb"))
                form.add_field("file", file, filename=path.name, content_type="application/octet-stream")
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url, data=form, headers=self._headers, ssl=self.tls()) as answer,
            ):
                body = await answer.json(content_type=None)
                if answer.status != 200 or not isinstance(body, dict):
                    is_unseen = self.by_folder and "adapter_missing" in _reason(body)
                    failed = FolderNotSeen if is_unseen else PushFailed
                    raise failed(f"{self.url} refuses {self.name}: {answer.status} {_reason(body)}")
                return body


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SUFFIXES]


def _reason(body: Any) -> str:
    """Code and message of the error in a body, or the body itself, shortened."""
    error = body.get("error") if isinstance(body, dict) else None
    said = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(body)
    return said[:300]
