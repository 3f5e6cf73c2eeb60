"""Files of a repository of the Hugging Face Hub, through `huggingface_hub`: its cache, its tokens and its variables.

Only files that the caller selects by name are downloaded. The server is not trusted: names, sizes and lengths are
checked, and so are the headers of which the library makes paths. Import it only to use it: both libraries are heavy,
and absent where nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from huggingface_hub import HfApi, HfUri, errors, get_session, hf_hub_download, parse_hf_uri, snapshot_download

from adapters.errors import AdapterTooLarge, HubFailed, InvalidReference
from process.exhaustion import is_disk_full

_LISTING_BYTES = 64 * 1024**2
_TIMEOUT_S = 30.0  # for the server's next bytes
_COMMIT = re.compile("[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
_SOUND_HEADERS = (("etag", _ETAG), ("x-linked-etag", _ETAG), ("x-repo-commit", _COMMIT))
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_LOGIN = "`hf auth login` (or set HF_TOKEN)"

# From the names and sizes of a folder's files to the names to download. Raises AdapterError.
Select = Callable[[Mapping[str, int]], Collection[str]]


@dataclass(frozen=True, slots=True)
class HubFolder:
    """Files of one commit in the library's cache. They may be links."""

    place: HfUri  # with the commit, which never changes
    path: Path
    sizes: Mapping[str, int]  # bytes, by name


def parse(text: str) -> HfUri:
    """What `hf://OWNER/REPOSITORY[@REVISION][/FOLDER]` names. Raises InvalidReference."""
    try:
        place = parse_hf_uri(text)
    except ValueError as error:
        raise InvalidReference(f"{error} Write hf://OWNER/REPOSITORY[@REVISION][/FOLDER]") from None
    names = [*(place.revision or "").split("/"), *place.path_in_repo.split("/")]
    if place.type != "model" or not all(_NAME.fullmatch(name) for name in names if name):
        raise InvalidReference(
            f"{text!r} is no folder of a model's repository: hf://OWNER/REPOSITORY[@REVISION][/FOLDER]"
        )
    return place


def shown(place: HfUri) -> str:
    """As its user writes it."""
    return place.to_uri().replace("hf://models/", "hf://")


def fetch(
    place: HfUri, select: Select, max_bytes: int | None = None, say: Callable[[str], None] = lambda text: None
) -> HubFolder:
    """Download the selected files, unless the cache has them, which is all that is used without network. Blocking.

    `max_bytes`: of all files together. `say` gets a line before a download. Raises HubFailed, AdapterTooLarge for more
    bytes, and what `select` raises.
    """
    with _guarded() as guard:
        try:
            info = HfApi().model_info(place.id, revision=place.revision, timeout=_TIMEOUT_S, files_metadata=True)
            pinned, listed = _listing(place, info.sha, info.siblings)
        except (httpx.TransportError, errors.OfflineModeIsEnabled) as error:
            return _cached(place, select, error)
        except errors.HfHubHTTPError as error:
            if error.response.status_code >= 500 or error.response.status_code == 429:
                return _cached(place, select, error)
            raise _refused(place, error) from error
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HubFailed(f"{shown(place)}: the server's answer cannot be used ({_short(error)})") from error
        sizes = {name: listed[name] for name in select(listed)}
        num_bytes = sum(sizes.values())
        if max_bytes is not None and num_bytes > max_bytes:
            raise AdapterTooLarge(
                f"{shown(place)} has files of {num_bytes:,} bytes; at most {max_bytes:,} are accepted"
            )
        say(f"Fetching {shown(pinned)}: {len(sizes)} files, {num_bytes:,} bytes")
        paths = [_download(place, pinned, name, size, guard) for name, size in sizes.items()]
    return HubFolder(pinned, paths[0].parent if paths else Path(), sizes)


def _listing(place: HfUri, commit: Any, files: Any) -> tuple[HfUri, dict[str, int]]:
    """The place with its commit, and the sizes of its files. Raises ValueError and more for what is no listing."""
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"its commit is {commit[:60]!r}, not 40 hex digits")
    sizes: dict[str, int] = {}
    for each in files or ():
        folder, _, name = each.rfilename.rpartition("/")
        if folder == place.path_in_repo and _NAME.fullmatch(name):
            if type(each.size) is not int or each.size < 0:
                raise ValueError(f"it lists {name} with a size of {str(each.size)[:60]!r}")
            sizes[name] = each.size
    return replace(place, revision=commit), sizes


def _download(place: HfUri, pinned: HfUri, name: str, size: int, guard: _Guard) -> Path:
    guard.max_bytes = size
    try:
        # By the revision's name, so that the cache is found by it without network.
        path = Path(hf_hub_download(place.id, str(PurePosixPath(place.path_in_repo, name)), revision=place.revision))
    except errors.HfHubHTTPError as error:
        raise _refused(place, error) from error
    except (httpx.HTTPError, ValueError, OSError) as error:
        remedy = "free disk space, or set HF_HOME to another folder" if is_disk_full(error) else "try again"
        raise HubFailed(f"{shown(place)}: {name} cannot be downloaded ({_short(error)}); {remedy}") from error
    if pinned.revision not in path.parts:
        raise HubFailed(f"{shown(place)}: it has changed during the download; try again")
    if (found := path.stat().st_size) != size:
        raise HubFailed(f"{path} has {found:,} bytes, but the server lists {size:,}; delete it and try again")
    return path


def _cached(place: HfUri, select: Select, cause: Exception) -> HubFolder:
    """What the cache has of it. Raises HubFailed with the cause for which the server was not asked."""
    command = f"hf download {place.id}{f' --revision {place.revision}' if place.revision else ''}"
    try:
        found = snapshot_download(place.id, revision=place.revision, local_files_only=True, allow_patterns=[])
        folder = Path(found, place.path_in_repo)
        files = folder.iterdir() if folder.is_dir() else ()
        sizes = {each.name: each.stat().st_size for each in files if each.is_file()}
        pinned = replace(place, revision=Path(found).name)
        return HubFolder(pinned, folder, {name: sizes[name] for name in select(sizes)})
    except (errors.LocalEntryNotFoundError, HubFailed) as error:
        lack = f"has only a part: {error}" if isinstance(error, HubFailed) else "does not have it"
        raise HubFailed(
            f"{shown(place)}: the Hub cannot be asked ({_short(cause)}), and the cache {lack}. Where there is network, "
            f"run `{command}`; then copy the cache here, or name the files' directory"
        ) from cause


class _Guard:
    """Checks each answer before the library uses it."""

    max_bytes = _LISTING_BYTES  # of a body

    def ask_for_plain_bytes(self, request: httpx.Request) -> None:
        request.headers["accept-encoding"] = "identity"  # a compressed body may be of any length

    def check(self, response: httpx.Response) -> None:
        for header, pattern in _SOUND_HEADERS:
            if not pattern.fullmatch(value := response.headers.get(header, "0" * 40)):
                raise HubFailed(f"{response.url} answers with an unsound header: {header}: {value[:80]!r}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubFailed(f"{response.url} answers with a compressed body, which was not asked for")
        if response.url.scheme == "https" and response.headers.get("location", "").startswith("http:"):
            raise HubFailed(f"{response.url} redirects to an address without TLS")
        assert isinstance(response.stream, httpx.SyncByteStream)
        max_bytes = max(self.max_bytes, _LISTING_BYTES if response.is_error else 0)
        response.stream = _Bounded(response, response.stream, max_bytes)


class _Bounded(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, inner: httpx.SyncByteStream, max_bytes: int) -> None:
        self._url, self._inner, self._max_bytes = response.url, inner, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        left = self._max_bytes
        for chunk in self._inner:
            left -= len(chunk)
            if left < 0:
                raise HubFailed(f"{self._url} sends more than the {self._max_bytes:,} bytes that it may")
            yield chunk

    def close(self) -> None:
        self._inner.close()


@contextmanager
def _guarded() -> Iterator[_Guard]:
    guard, session = _Guard(), get_session()
    before = session.event_hooks
    session.event_hooks = {
        "request": [*before["request"], guard.ask_for_plain_bytes],
        "response": [*before["response"], guard.check],
    }
    try:
        yield guard
    finally:
        session.event_hooks = before


def _refused(place: HfUri, error: errors.HfHubHTTPError) -> HubFailed:
    remedies = {
        errors.GatedRepoError: f"its owner admits only some; ask on its page for access, then {_LOGIN}",
        errors.RepositoryNotFoundError: f"the Hub has no such repository, or it is private: check the id, or {_LOGIN}",
        errors.RevisionNotFoundError: "the repository has no such revision; name a branch, a tag or a commit",
    }
    otherwise = f"the Hub answers {error.response.status_code} ({_short(error)}); if it asks for a token, {_LOGIN}"
    return HubFailed(f"{shown(place)}: {remedies.get(type(error), otherwise)}")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
