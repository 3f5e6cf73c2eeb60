"""Finds the agents of workers in objects of the Kubernetes API: EndpointSlices and Pods, as parsed JSON.

Objects are not trusted to be well-formed: an agent whose fields are missing or have another type is skipped.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterator
from typing import Any, NamedTuple

_MAX_ENDPOINTS = 1000  # of one EndpointSlice, as the API server allows


class Agent(NamedTuple):
    """An agent of one Pod."""

    address: str  # host:port, as gRPC takes it
    pod: str  # the Pod's uid; an address may pass to another Pod


class Standing(enum.IntEnum):
    """The state of an agent according to Kubernetes. Of several statements about one Pod, the highest wins."""

    READY = 0
    UNREADY = 1  # peers find it, so that it can become ready
    ENDING = 2  # its Pod is being deleted: before the agent knows


def agents_of_slice(found: dict[str, Any], port: int | str) -> dict[Agent, Standing]:
    """The agents in an EndpointSlice.

    `port`: a number, or the name of one of the slice's ports. A Service with publishNotReadyAddresses calls all ready.
    """
    number = port if isinstance(port, int) else _port_called(port, _list(found.get("ports")), "port")
    if number is None:
        return {}
    agents = {}
    for endpoint in _dicts(_list(found.get("endpoints"))[:_MAX_ENDPOINTS]):
        conditions = _dict(endpoint.get("conditions"))
        standing = Standing.UNREADY if conditions.get("ready") is False else Standing.READY
        if conditions.get("terminating") is True:
            standing = Standing.ENDING
        addresses = _list(endpoint.get("addresses"))  # all lead to the same Pod
        if addresses and (address := _address(addresses[0], number)):
            agents[Agent(address, _text(_dict(endpoint.get("targetRef")).get("uid")))] = standing
    return agents


def agents_of_pod(found: dict[str, Any], port: int | str) -> dict[Agent, Standing]:
    """The agent in a Pod.

    `port`: a number, or the name of a port of one of its containers.
    """
    metadata, spec, status = (_dict(found.get(key)) for key in ("metadata", "spec", "status"))
    ports = [each for container in _dicts(_list(spec.get("containers"))) for each in _list(container.get("ports"))]
    number = port if isinstance(port, int) else _port_called(port, ports, "containerPort")
    address = _address(status.get("podIP"), number) if number is not None else ""
    if not address:
        return {}
    is_ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in _dicts(_list(status.get("conditions")))
    )
    standing = Standing.READY if is_ready else Standing.UNREADY
    if metadata.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed"):
        standing = Standing.ENDING
    return {Agent(address, _text(metadata.get("uid"))): standing}


def name_of(found: dict[str, Any]) -> str:
    """The object's name; empty: it has none."""
    return _text(_dict(found.get("metadata")).get("name"))


def version_of(found: dict[str, Any]) -> str:
    """The resourceVersion of an object or a list; empty: it has none."""
    return _text(_dict(found.get("metadata")).get("resourceVersion"))


def _port_called(name: str, ports: list[Any], key: str) -> int | None:
    numbers = (each.get(key) for each in _dicts(ports) if each.get("name") == name)
    return next((number for number in numbers if isinstance(number, int) and 1 <= number <= 65535), None)


def _address(host: object, port: int) -> str:
    """host:port; empty if no agent can be there."""
    try:
        address = ipaddress.ip_address(_text(host))
    except ValueError:
        return ""  # an EndpointSlice of names, or a Pod that has no address yet
    if address.is_unspecified or address.is_multicast:
        return ""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _dicts(values: list[Any]) -> Iterator[dict[str, Any]]:
    return (value for value in values if isinstance(value, dict))


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
