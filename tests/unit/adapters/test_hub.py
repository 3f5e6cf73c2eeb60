"""Downloads from the Hub by its own library, from a real server: what is taken, what is refused, what the cache has."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.http.hub import COMMIT, HubServer, serving

from adapters.errors import AdapterTooLarge, HubFailed, InvalidReference
from adapters.hub import _Guard, fetch, parse, shown

REPOSITORY = "some-one/some.thing"
FILES = {"config.json": b"{}", "weights.safetensors": b"w" * 5000, "run.py": b"import os", "part/config.json": b"[]"}
HERE = parse(f"hf://{REPOSITORY}")
UNUSABLE = "the server's answer cannot be used"


def known(sizes) -> list[str]:
    return [name for name in ("config.json", "weights.safetensors") if name in sizes]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "in" / "a" / "folder" / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(HubServer(REPOSITORY, dict(FILES)), monkeypatch, cache) as server:
        yield server


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_selected_is_downloaded_once(hub: HubServer, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    said: list[str] = []
    found = fetch(HERE, known, None, said.append)
    assert shown(found.place) == f"hf://{REPOSITORY}@{COMMIT}"
    assert (found.path / "weights.safetensors").read_bytes() == FILES["weights.safetensors"]
    assert files_in(found.path) == {"config.json", "weights.safetensors"}
    assert said == [f"Fetching hf://{REPOSITORY}@{COMMIT}: 2 files, 5,002 bytes"]
    assert (hub.tokens, hub.encodings) == ({"Bearer hf_secret"}, {"identity"})
    hub.served.clear()
    assert fetch(HERE, known, None) == found
    assert not [each for each in hub.served if each.startswith("GET")]


def test_a_folder_of_the_repository(hub: HubServer):
    found = fetch(parse(f"hf://{REPOSITORY}@main/part"), known, None)
    assert (found.path / "config.json").read_bytes() == b"[]"
    assert shown(found.place) == f"hf://{REPOSITORY}@{COMMIT}/part"


@pytest.mark.parametrize(
    "text",
    ["hf://one", "hf://a/b@", "hf://a/b@../../x", "hf://a/b/../c", "hf://datasets/a/b", "hf://a/b/.git", "hf://a b/c"],
)
def test_what_names_no_folder_of_a_model(text: str):
    with pytest.raises(InvalidReference):
        parse(text)


def test_sizes_are_known_before_a_download(hub: HubServer):
    with pytest.raises(AdapterTooLarge, match=r"5,002 bytes; at most 5,001"):
        fetch(HERE, known, 5001)
    assert hub.served == ["listing"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("listing", {"sha": "../../../../x"}, UNUSABLE),
        ("listing", {"sha": None}, UNUSABLE),
        ("listing", {"siblings": [{"rfilename": "config.json", "size": -1}]}, UNUSABLE),
        ("listing", {"siblings": [{"rfilename": "config.json"}]}, UNUSABLE),
        ("listing", {"siblings": 7}, UNUSABLE),
        ("headers", {"ETag": '"../../../../escaped"'}, None),
        ("headers", {"X-Linked-Etag": "/tmp/escaped"}, None),
        ("headers", {"X-Repo-Commit": "../../../../escaped"}, None),
        ("bodies", {"weights.safetensors": b"w" * 10}, None),
        ("sizes", {"weights.safetensors": 4000}, None),
        ("sizes", {"weights.safetensors": 6000}, None),
        (
            "bodies",
            {"weights.safetensors": b"w" * 10**6},
            r"resolve/main/weights\.safetensors sends more than the 5,000 bytes",
        ),
        ("headers", {"X-Repo-Commit": "f" * 40}, "has changed during the download"),
    ],
)
def test_hostile_answers(hub: HubServer, cache: Path, tmp_path: Path, name: str, error, says: str | None):
    getattr(hub, name).update(error)
    with pytest.raises(HubFailed, match=says):
        fetch(HERE, known, None)
    outside = {path for path in tmp_path.rglob("*") if not path.is_relative_to(cache)} - set(cache.parents)
    assert not outside
    # Of a wrong length, a file may be in the cache; what is too long is not.
    assert name == "sizes" or "weights.safetensors" not in files_in(cache)


def test_a_missing_file_of_a_hostile_server(hub: HubServer, tmp_path: Path):
    """The library keeps in the cache, under the commit that the server says, that there is no such file."""
    hub.file_error, hub.headers["X-Repo-Commit"] = (404, "EntryNotFound"), "../../../../../escaped"
    with pytest.raises(HubFailed, match="unsound header: x-repo-commit"):
        fetch(HERE, known, None)
    assert not list(tmp_path.rglob("escaped"))


def test_a_compressed_body_may_be_of_any_length(hub: HubServer):
    hub.files["weights.safetensors"] = gzip.compress(b"w" * 10**6)
    hub.headers["Content-Encoding"] = "gzip"
    with pytest.raises(HubFailed, match="compressed body"):
        fetch(HERE, known, None)


def test_no_redirect_leaves_tls(hub: HubServer):
    """The check alone: the server has no certificate."""
    answer = httpx.Response(302, headers={"location": "http://a/b"}, request=httpx.Request("GET", "https://a/b"))
    with pytest.raises(HubFailed, match="without TLS"):
        _Guard().check(answer)


def test_names_that_leave_the_folder_are_never_selected(hub: HubServer):
    def all_names(sizes) -> list[str]:
        assert set(sizes) == {"config.json", "weights.safetensors", "run.py"}
        return []

    hub.files |= {"../../x": b"", "/etc/passwd": b"", "..": b"", ".git": b"", "a\\..\\b": b"", "part/../x": b""}
    fetch(HERE, all_names, None)


def test_a_listing_without_end(hub: HubServer, monkeypatch):
    monkeypatch.setattr(_Guard, "max_bytes", 10_000)
    hub.listing["tags"] = ["x" * 20_000]
    with pytest.raises(HubFailed, match="sends more than the 10,000 bytes"):
        fetch(HERE, known, None)


def test_redirects_without_end(hub: HubServer):
    hub.redirect_to = f"{hub.url}/{REPOSITORY}/resolve/main/config.json"
    with pytest.raises(HubFailed, match=r"config\.json cannot be downloaded"):
        fetch(HERE, known, None)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        (
            "listing_error",
            (401, "RepoNotFound"),
            "no such repository, or it is private: check the id, or `hf auth login`",
        ),
        ("listing_error", (404, "RevisionNotFound"), "has no such revision"),
        ("listing_error", (403, ""), "answers 403"),
        ("file_error", (403, "GatedRepo"), "its owner admits only some"),
        ("file_error", (404, "EntryNotFound"), "answers 404"),
    ],
)
def test_what_the_hub_refuses(hub: HubServer, where: str, error, words: str):
    setattr(hub, where, error)
    with pytest.raises(HubFailed, match=r"^hf://some-one/some\.thing@v9: ") as caught:
        fetch(parse(f"hf://{REPOSITORY}@v9"), known, None)
    assert words in str(caught.value)


@pytest.mark.parametrize("how", ["offline", "unreachable", "down", "busy", "silent"])
def test_without_the_hub_the_cache_is_used(hub: HubServer, how: str, monkeypatch):
    from huggingface_hub import constants

    def unreachable() -> None:
        if how == "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        elif how == "unreachable":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        elif how == "silent":
            monkeypatch.setattr("adapters.hub._TIMEOUT_S", 0.1)
            hub.answers.clear()
        else:
            hub.listing_error = (503 if how == "down" else 429, "")

    unreachable()
    with pytest.raises(HubFailed, match=f"hf download {REPOSITORY}`; then copy the cache here"):
        fetch(HERE, known, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr("adapters.hub._TIMEOUT_S", 30.0)
    hub.listing_error = None
    hub.answers.set()
    online = fetch(HERE, known, None)
    unreachable()
    assert fetch(HERE, known, None) == online
    assert fetch(online.place, known, None) == online  # by its commit
