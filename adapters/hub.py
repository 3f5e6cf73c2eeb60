"""Files of a repository of the Hugging Face Hub, through `huggingface_hub`: its cache, its tokens and its variables.

Only files that the caller selects by name are downloaded. The server is not trusted: names, sizes and lengths are
checked, and so are the headers of which the library makes paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterTooLarge, HubFailed, InvalidReference
from process.exhaustion import is_disk_full

if TYPE_CHECKING:
    import httpx

SCHEME = "hf://"
_LISTING_BYTES = 64 * 1024**2
_TIMEOUT_S = 30.0  # for the server's next bytes
_COMMIT = re.compile("[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")

# From the names and sizes of a folder's files to the names to download. Raises AdapterError.
Select = Callable[[Mapping[str, int]], Collection[str]]


@dataclass(frozen=True, slots=True)
class HubReference:
    """What `hf://owner/repository[@revision][/path]` names."""

    repository: str
    revision: str | None  # a branch, a tag or a commit; None: the main branch
    path: str = ""  # of a folder in the repository

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Raises InvalidReference, and HubFailed if the library is not installed."""
        with _library():
            from huggingface_hub import parse_hf_uri
        try:
            uri = parse_hf_uri(text)
        except ValueError as error:
            raise InvalidReference(f"{error} Write {SCHEME}OWNER/REPOSITORY[@REVISION][/FOLDER]") from None
        if uri.type != "model":
            raise InvalidReference(f"{text!r} is a {uri.type}; name a repository of a model or an adapter")
        names = [*(uri.revision or "").split("/"), *uri.path_in_repo.split("/")]
        if bad := next((name for name in names if name and not _NAME.fullmatch(name)), None):
            raise InvalidReference(f"{text!r}: {bad!r} cannot be part of a revision or of a folder's path")
        return cls(uri.id, uri.revision, uri.path_in_repo)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repository}{revision}{f'/{self.path}' if self.path else ''}"

    @property
    def command(self) -> str:
        """Which downloads it by hand."""
        return f"hf download {self.repository}{f' --revision {self.revision}' if self.revision else ''}"


@dataclass(frozen=True, slots=True)
class HubFolder:
    """Files of one commit in the library's cache. They may be links."""

    reference: HubReference  # its revision is the commit, which never changes
    path: Path
    sizes: Mapping[str, int]  # bytes, by name


def fetch(
    reference: HubReference, select: Select, max_bytes: int | None, say: Callable[[str], None] = lambda text: None
) -> HubFolder:
    """Download the selected files, unless the cache has them, which is all that is used without network. Blocking.

    `max_bytes`: of all files together. `say` gets a line before a download. Raises HubFailed, AdapterTooLarge for more
    bytes, and what `select` raises.
    """
    with _library():
        import httpx
        from huggingface_hub import HfApi, get_session, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    with _guarded(get_session()) as guard:
        try:
            info = HfApi().model_info(
                reference.repository, revision=reference.revision, timeout=_TIMEOUT_S, files_metadata=True
            )
            pinned, listed = _listing(reference, info.sha, info.siblings)
        except (httpx.TransportError, OfflineModeIsEnabled) as error:
            return _cached(reference, select, error)
        except HfHubHTTPError as error:
            if error.response.status_code >= 500 or error.response.status_code == 429:
                return _cached(reference, select, error)
            raise _refused(reference, error) from error
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HubFailed(f"{reference}: the server's answer cannot be used ({_short(error)})") from error
        sizes = {name: listed[name] for name in select(listed)}
        if max_bytes is not None and sum(sizes.values()) > max_bytes:
            raise AdapterTooLarge(
                f"{reference}: its files have {sum(sizes.values()):,} bytes; at most {max_bytes:,} are accepted here"
            )
        say(f"Fetching {pinned}: {len(sizes)} files, {sum(sizes.values()):,} bytes")
        folder = Path()
        for name, size in sizes.items():
            guard.max_bytes = size
            inside = str(PurePosixPath(pinned.path, name))
            try:
                # By the revision's name, so that the cache is found by it without network.
                path = Path(hf_hub_download(pinned.repository, inside, revision=reference.revision))
            except HfHubHTTPError as error:
                raise _refused(reference, error) from error
            except (httpx.HTTPError, ValueError, OSError) as error:
                remedy = "free disk space, or set HF_HOME to another folder" if is_disk_full(error) else "try again"
                raise HubFailed(f"{reference}: {name} cannot be downloaded ({_short(error)}); {remedy}") from error
            if pinned.revision not in path.parts:
                raise HubFailed(f"{reference}: it has changed during the download; try again")
            if path.stat().st_size != size:
                raise HubFailed(
                    f"{reference}: {path} has {path.stat().st_size:,} bytes, but the server lists {size:,}; delete it "
                    "and try again"
                )
            folder = path.parent
    return HubFolder(pinned, folder, sizes)


def _listing(reference: HubReference, commit: Any, files: Any) -> tuple[HubReference, dict[str, int]]:
    """The reference by commit, and the sizes of the folder's files. Raises ValueError for what cannot be a listing."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError(f"its commit is {str(commit)[:60]!r}, not 40 hex digits")
    sizes: dict[str, int] = {}
    for each in files or ():
        folder, _, name = str(each.rfilename).rpartition("/")
        if folder == reference.path and _NAME.fullmatch(name):
            if type(each.size) is not int or each.size < 0:
                raise ValueError(f"it lists {name} with a size of {str(each.size)[:60]!r}")
            sizes[name] = each.size
    return replace(reference, revision=commit), sizes


def _cached(reference: HubReference, select: Select, cause: Exception) -> HubFolder:
    """What the cache has of it. Raises HubFailed with the cause for which the server was not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    without = f"{reference}: the Hub cannot be asked ({_short(cause)})"
    remedy = (
        f"Where there is network, run `{reference.command}`; then copy the cache here, or name the files' directory"
    )
    try:
        snapshot = Path(
            snapshot_download(
                reference.repository, revision=reference.revision, local_files_only=True, allow_patterns=[]
            )
        )
    except LocalEntryNotFoundError:
        raise HubFailed(f"{without}, and the cache does not have it. {remedy}") from cause
    folder = snapshot / reference.path
    sizes = {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()} if folder.is_dir() else {}
    pinned = replace(reference, revision=snapshot.name)
    try:
        return HubFolder(pinned, folder, {name: sizes[name] for name in select(sizes)})
    except HubFailed as error:
        raise HubFailed(f"{without}, and the cache has only a part: {error}. {remedy}") from cause


class _Guard:
    """Checks each answer before the library uses it."""

    def __init__(self) -> None:
        self.max_bytes = _LISTING_BYTES  # of a body

    def ask_for_plain_bytes(self, request: httpx.Request) -> None:
        request.headers["accept-encoding"] = "identity"  # a compressed body may be of any length

    def check(self, response: httpx.Response) -> None:
        for header, pattern in (("etag", _ETAG), ("x-linked-etag", _ETAG), ("x-repo-commit", _COMMIT)):
            value = response.headers.get(header)
            if value is not None and not pattern.fullmatch(value):
                raise HubFailed(f"{response.url} answers with an unsound header: {header}: {value[:80]!r}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubFailed(f"{response.url} answers with a compressed body, which was not asked for")
        if response.url.scheme == "https" and response.headers.get("location", "").startswith("http:"):
            raise HubFailed(f"{response.url} redirects to an address without TLS")
        response.stream = _bounded(response, max(self.max_bytes, _LISTING_BYTES if response.is_error else 0))


def _bounded(response: httpx.Response, max_bytes: int) -> Any:
    import httpx

    inner = response.stream

    class Bounded(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            left = max_bytes
            assert isinstance(inner, httpx.SyncByteStream)
            for chunk in inner:
                left -= len(chunk)
                if left < 0:
                    raise HubFailed(f"{response.url} sends more than the {max_bytes:,} bytes that it may")
                yield chunk

        def close(self) -> None:
            assert isinstance(inner, httpx.SyncByteStream)
            inner.close()

    return Bounded()


@contextmanager
def _guarded(session: httpx.Client) -> Iterator[_Guard]:
    guard, hooks = _Guard(), session.event_hooks
    session.event_hooks = {
        "request": [*hooks["request"], guard.ask_for_plain_bytes],
        "response": [*hooks["response"], guard.check],
    }
    try:
        yield guard
    finally:
        session.event_hooks = hooks


@contextmanager
def _library() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise HubFailed(
            f"{error.name} is not installed, which downloads from the Hub; install huggingface_hub, or name a directory"
        ) from error


def _refused(reference: HubReference, error: Any) -> HubFailed:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        text = "its owner admits only some; ask on its page for access, then `hf auth login` (or set HF_TOKEN)"
    elif isinstance(error, RepositoryNotFoundError):
        text = "the Hub has no such repository, or it is private: check the id, or `hf auth login` (or set HF_TOKEN)"
    elif isinstance(error, RevisionNotFoundError):
        text = f"the repository has no revision {reference.revision!r}; name a branch, a tag or a commit"
    elif error.response.status_code in (401, 403):
        text = f"the Hub refuses the token ({error.response.status_code}); run `hf auth login` (or set HF_TOKEN)"
    else:
        text = f"the Hub answers {error.response.status_code} ({_short(error)})"
    return HubFailed(f"{reference}: {text}")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"
