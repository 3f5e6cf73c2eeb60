"""The sources of workers that cluster.yaml names in `discovery`; for commands, what they find when asked once."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import grpc

from cluster.config.discovery import DiscoveryConfig, split_nameserver
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.transport import AgentChannel, Transport
from cluster.discovery.descriptions import check_description
from cluster.discovery.source import Endpoint, WorkerSource
from cluster.errors import DescriptionRefused, SourceUnavailable
from process.addresses import host_and_port

_ALL_ROLES = ("prefill", "decode", "unified")
_DESCRIBE_TIMEOUT_S = 5.0
_MAX_CALLS = 64  # concurrent


def configured_sources(config: DiscoveryConfig, roles: Collection[str] = _ALL_ROLES) -> list[WorkerSource]:
    """The source of each of these roles that has one."""
    wanted = [(role, found) for role, found in config.by_role.items() if role in roles]
    if not wanted:
        return []
    from cluster.discovery.dns import DnsSource  # its library is slow to import, and most clusters do not need it

    nameservers = [split_nameserver(each) for each in config.nameservers]
    return [
        DnsSource(found.dns, role, port=found.control_port, interval_s=config.interval_s, nameservers=nameservers)
        for role, found in wanted
    ]


@dataclass(frozen=True, slots=True)
class FoundWorkers:
    """The workers that discovery has found."""

    endpoints: dict[str, Endpoint]  # by name; of several with one name that with the lowest address, as for routers
    problems: dict[str, str]  # what cannot be used, by source or address: why


async def found_workers(config: ClusterConfig, transport: Transport) -> FoundWorkers:
    """Query all sources, and ask the workers that they name for their descriptions."""
    problems: dict[str, str] = {}
    endpoints: set[Endpoint] = set()
    for source in configured_sources(config.discovery):
        try:
            await source.refresh()
        except SourceUnavailable as error:
            problems[source.label] = str(error)
        endpoints |= source.endpoints
    listed = {host_and_port(worker.host, worker.control_port) for worker in config.workers.values()}
    asked = sorted(endpoint for endpoint in endpoints if endpoint.address not in listed)[: config.discovery.max_workers]
    slots = asyncio.Semaphore(_MAX_CALLS)

    async def describe(endpoint: Endpoint) -> pb.WorkerDescription | str:
        channel = AgentChannel(transport, endpoint.address, endpoint.role, "")
        async with slots:
            try:
                stub = await channel.stub()
                description = await stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
                channel.check_name(description.name)
                transport.check_role(description, endpoint.role)
                check_description(description, config.model.name)
            except grpc.aio.AioRpcError as error:
                return f"its agent cannot be reached: {error.code().name.lower()}"
            except DescriptionRefused as error:
                return str(error)
            finally:
                await channel.aclose()
            if description.name in config.workers:
                return f"its name is {description.name!r}, which is that of another worker, in cluster.yaml"
            return description

    answers = await asyncio.gather(*(describe(endpoint) for endpoint in asked))
    found: dict[str, tuple[Endpoint, str]] = {}
    for endpoint, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            problems[endpoint.address] = answer
        elif answer.name not in found:
            found[answer.name] = endpoint, answer.agent_id
        elif not answer.agent_id or answer.agent_id != found[answer.name][1]:
            used = found[answer.name][0].address
            problems[endpoint.address] = f"its name is {answer.name!r}, as that of the worker at {used}, which is used"
    return FoundWorkers({name: endpoint for name, (endpoint, _) in found.items()}, problems)
