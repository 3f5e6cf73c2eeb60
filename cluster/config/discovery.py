"""The section `discovery` of `cluster.yaml`: workers that come and go."""

from ipaddress import ip_address
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from cluster.config.fields import Section, is_dns_name
from cluster.config.workers import EachWorkerConfig


def _check_dns_name(name: str) -> str:
    if not is_dns_name(name):
        raise ValueError("expected a DNS name with A or AAAA records, such as prefill.prelude.svc.cluster.local")
    return name


def split_nameserver(text: str) -> tuple[str, int]:
    """The IP address and the port, 53 unless it is given. Raises ValueError."""
    host, port = text, "53"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or "53"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    ip_address(host)
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{port} is no port")
    return host, int(port)


def _check_nameserver(text: str) -> str:
    try:
        split_nameserver(text)
    except ValueError as error:
        raise ValueError(f"expected an IP address, or one with a port, such as 10.0.0.10:53 ({error})") from error
    return text


class RoleDiscovery(Section):
    """Where workers of one role are found."""

    dns: Annotated[str, AfterValidator(_check_dns_name)]  # a name with A and AAAA records
    control_port: Annotated[int, Field(ge=1, le=65535)]  # of the agents
    worker: EachWorkerConfig = EachWorkerConfig()  # for the processes of such workers


class DiscoveryConfig(Section):
    """Sources of workers that come and go while the cluster runs, in addition to `workers`."""

    prefill: RoleDiscovery | None = None
    decode: RoleDiscovery | None = None
    unified: RoleDiscovery | None = None
    interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 5.0  # between two lookups by DNS, give or take a fifth
    nameservers: tuple[Annotated[str, AfterValidator(_check_nameserver)], ...] = ()  # IP or IP:port; (): the machine's

    max_workers: ClassVar[int] = 1024  # discovered ones; more are ignored, as a wrong record may list anything
    forget_after_s: ClassVar[float] = 60.0  # a discovered worker that is silent for this long is no longer listed

    @property
    def by_role(self) -> dict[str, RoleDiscovery]:
        """The configured sources by role."""
        found = {"prefill": self.prefill, "decode": self.decode, "unified": self.unified}
        return {role: discovery for role, discovery in found.items() if discovery is not None}
