"""Two hosts on this machine: network namespaces with a link between them, and one from each to this namespace.

    here --up0-- prefill --kv0-- decode --up0-- here

Engines are reached from here at the addresses that they have on the link between them, `kv0`, so nothing but what the
two hosts tell each other passes over it. It takes root, and Linux's `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("prefill", "decode")
LINK = "kv0"
_NET = "198.18"  # of RFC 2544: for benchmarks, routed nowhere


@dataclass(frozen=True)
class TwoHosts:
    """By host: its namespace, and its address on the link between the two."""

    namespaces: dict[str, str]
    addresses: dict[str, str]

    def command(self, host: str, words: list[str]) -> list[str]:
        """A command line that runs on the host."""
        return ["ip", "netns", "exec", self.namespaces[host], *words]

    def sent_bytes(self, host: str) -> int:
        """Over the link, since it is there."""
        path = f"/sys/class/net/{LINK}/statistics/tx_bytes"
        return int(subprocess.run(self.command(host, ["cat", path]), check=True, capture_output=True).stdout)

    def limit(self, rate: str) -> None:
        """Both directions of the link carry so much, as `tc` writes it: 50mbit."""
        self._shape("rate", rate, "burst", "256kb", "latency", "200ms")

    def cut(self) -> None:
        """The link loses every packet, silently: none is as small as the bucket of a byte."""
        self._shape("rate", "8bit", "burst", "1", "limit", "1")

    def mend(self) -> None:
        """The link carries everything."""
        for namespace in self.namespaces.values():
            _run("tc", "-n", namespace, "qdisc", "del", "dev", LINK, "root", check=False)

    def _shape(self, *words: str) -> None:
        for namespace in self.namespaces.values():
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", LINK, "root", "tbf", *words)


def why_not() -> str | None:
    """Why this machine cannot have two hosts; None: it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    probe = f"prelude-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "name", LINK, "type", "veth", "peer", "name", "up0")
        _run(
            "tc",
            "-n",
            probe,
            "qdisc",
            "add",
            "dev",
            LINK,
            "root",
            "tbf",
            *["rate", "1mbit", "burst", "32kb", "limit", "1"],
        )
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", probe, check=False)
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both are gone afterwards, with everything in them."""
    namespaces = {host: f"prelude-{host}-{os.getpid()}" for host in HOSTS}
    addresses = {host: f"{_NET}.2.{number + 1}" for number, host in enumerate(HOSTS)}
    try:
        for number, (host, namespace) in enumerate(namespaces.items()):
            up = f"pre{host[0]}{os.getpid()}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "link", "add", up, "type", "veth", "peer", "name", "up0", "netns", namespace)
            _run("ip", "addr", "add", f"{_NET}.{number}.1/30", "dev", up)
            _run("ip", "link", "set", up, "up")
            _run("ip", "-n", namespace, "addr", "add", f"{_NET}.{number}.2/30", "dev", "up0")
            _run("ip", "-n", namespace, "link", "set", "up0", "up")
            _run("ip", "route", "add", f"{addresses[host]}/32", "via", f"{_NET}.{number}.2")
        first, second = namespaces.values()
        _run("ip", "-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
        for host, namespace in namespaces.items():
            _run("ip", "-n", namespace, "addr", "add", f"{addresses[host]}/30", "dev", LINK)
            _run("ip", "-n", namespace, "link", "set", LINK, "up")
        yield TwoHosts(namespaces, addresses)
    finally:
        for namespace in namespaces.values():
            _run("ip", "netns", "del", namespace, check=False)  # its ends of the links, and so the others


def _run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=True, text=True, timeout=30, cwd=Path("/"))
