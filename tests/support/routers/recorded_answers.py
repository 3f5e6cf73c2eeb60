"""What an earlier release answered, recorded and compared: by the recorder in a checkout of it, and by today's tests.

Imports nothing of the product, so that it runs beside any release.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TYPE_ONLY = "type only:"  # begins the record of a value that may be any of its type
PROSE = frozenset({"message", "reason", "not_served"})  # for people: worded better from release to release
# Of the connection, not of the answer; or the length of a body that may have more fields today.
_TRANSPORT_HEADERS = frozenset({"date", "server", "connection", "transfer-encoding", "content-length"})


async def ask(cluster: Any, exchange: Mapping[str, Any], stand_ins: Any, base_url: str | None = None) -> dict[str, Any]:
    """Send the request of an exchange to the router of a cluster of stand-ins; its status, headers and content.

    `exchange["engines"]` says how engines behave meanwhile: by worker a list of behaviours of `stand_ins`, with their
    arguments. `exchange["form"]` is a list of fields; an empty name adds the files of an adapter, by its directory in
    the template of the stand-ins.
    """
    workers = {worker.name: worker for worker in cluster.workers}
    for name, behaviours in exchange.get("engines", {}).items():
        workers[name].engine.behaviours = [_behaviour(stand_ins, each) for each in behaviours]
    headers = dict(exchange.get("headers", {}))
    body: Any = None
    if "json" in exchange:
        body = json.dumps(exchange["json"]).encode()
        headers = {"content-type": "application/json", **headers}
    elif "body" in exchange:
        body = exchange["body"].encode("latin-1")
    elif "form" in exchange:
        body, content_type = _form(exchange["form"], stand_ins.TEMPLATE)
        headers = {"content-type": content_type, **headers}
    url = (base_url or cluster.url) + exchange["path"].replace("{revision}", stand_ins.REVISION_ID)
    async with cluster.http.request(exchange["method"], url, data=body, headers=headers) as response:
        content = await response.read()
        told = {name.lower(): value for name, value in response.headers.items()}
    if "allow" in told:
        told["allow"] = ", ".join(sorted(told["allow"].split(", ")))  # it is a set
    return {
        "status": response.status,
        "headers": {name: value for name, value in sorted(told.items()) if name not in _TRANSPORT_HEADERS},
        "content": _parsed(told.get("content-type", ""), content),
    }


def _behaviour(stand_ins: Any, described: Any) -> Any:
    if isinstance(described, str):
        return getattr(stand_ins, described)
    name, *arguments = described
    return getattr(stand_ins, name)(*arguments)


def _form(fields: list[list[str]], template: Path) -> tuple[bytes, str]:
    boundary = "a boundary of a recorded answer".replace(" ", "-")
    parts = []
    for name, value in fields:
        if name:
            parts.append(f'form-data; name="{name}"\r\n\r\n{value}'.encode())
            continue
        for path in sorted((template / value).iterdir()):
            head = f'form-data; name="file"; filename="{path.name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
            parts.append(head.encode() + path.read_bytes())
    lines = [f"--{boundary}\r\nContent-Disposition: ".encode() + part + b"\r\n" for part in parts]
    return b"".join(lines) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def _parsed(content_type: str, content: bytes) -> Any:
    kind = content_type.partition(";")[0]
    if kind == "application/json" and content:  # none for HEAD
        return json.loads(content)
    if kind == "text/event-stream":
        assert content.endswith(b"\n\n"), content[-100:]
        events = [event.decode() for event in content.split(b"\n\n")[:-1]]
        parsed = [event if event == "data: [DONE]" else json.loads(event.removeprefix("data: ")) for event in events]
        return sorted(parsed, key=_choice_of)  # choices of one request have no order among each other
    if kind == "application/x-tar":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return {member.name: member.size for member in archive}
    if content.startswith(b"# HELP "):
        return sample_names(content.decode())
    return content.decode()


def _choice_of(event: Any) -> int:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0]["index"] if choices else 2**31


def sample_names(page: str) -> dict[str, list[str]]:
    """The labels of every sample of a metrics page."""
    found: dict[str, set[str]] = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        name, _, labels = line.rpartition(" ")[0].partition("{")
        found.setdefault(name, set()).update(each.partition("=")[0] for each in labels.rstrip("}").split(",") if each)
    return {name: sorted(labels) for name, labels in sorted(found.items())}


def recorded(one: Any, other: Any, place: str = "") -> Any:
    """One record of two answers to the same: what differs between them, prose and durations, by type only."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: recorded(value, other[key], f"{place}.{key}") for key, value in one.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [recorded(each, another, place) for each, another in zip(one, other, strict=True)]
    assert type(one) is type(other), (place, one, other)
    is_prose = place.rpartition(".")[2] in PROSE and isinstance(one, str) and one != ""
    is_duration = isinstance(one, float) and (".workers." in place or place.endswith(".seconds"))
    if one != other or is_prose or is_duration:
        return f"{TYPE_ONLY} {type(one).__name__}"
    return one


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """What of a record is not in an answer. Fields that are new are none."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key, value in expected.items()
            for line in (
                differences(found[key], value, f"{place}.{key}") if key in found else [f"{place}.{key} is not there"]
            )
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (each, record) in pairs for line in differences(each, record, f"{place}[{i}]")]
    if isinstance(expected, str) and expected.startswith(TYPE_ONLY):
        if f"{TYPE_ONLY} {type(found).__name__}" == expected:
            return []
    elif type(found) is type(expected) and found == expected:
        return []
    return [f"{place} is {found!r}, was {expected!r}"]


async def mended(cluster: Any) -> None:
    """Wait until engines that failed in an exchange are used again."""
    for worker in cluster.workers:
        worker.engine.behaviours = []
    for _ in range(300):
        if (await cluster.post(prompt="Hi"))[0] == 200:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the router answers no request any more")
