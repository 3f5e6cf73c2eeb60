"""A cluster on IPv6 addresses: in URLs they have brackets, and ports are looked for and opened on them."""

import socket
from pathlib import Path

import pytest
from support.clusters.configs import config_of

from cluster.agent.engine_spec import engine_spec
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from cluster.local.ports import bound_listener, check_free, with_ports
from cluster.local.supervisor import LocalCluster
from router.server import worker_addresses

try:
    with socket.socket(socket.AF_INET6) as looked:
        looked.bind(("::1", 0))
except OSError:  # of containers without IPv6
    pytestmark = pytest.mark.skip(reason="this machine has no IPv6 loopback address")


def config(folder: Path, port: int = 0) -> ClusterConfig:
    worker = {"role": "unified", "host": "::1", "control_port": 5000, "engine_port": 5001}
    return config_of({"u": worker}, folder, router={"host": "::1", "port": port, "admin": {"host": "::1", "port": 9}})


def test_addresses_have_brackets(tmp_path: Path):
    found = config(tmp_path, 8000)
    assert worker_addresses(found) == {"u": ("unified", "[::1]:5000")}
    assert engine_spec(found, "u", tmp_path).url == "http://[::1]:5001"
    cluster = LocalCluster(found, tmp_path)
    assert (cluster.url, cluster.admin_url) == ("http://[::1]:8000", "http://[::1]:9")
    assert cluster._page_url("router") == cluster.admin_url  # with the certificate for clients it would look hung


def test_ports_are_chosen_there(tmp_path: Path):
    chosen = with_ports(config(tmp_path))
    assert chosen.router.port
    assert chosen.workers["u"].metrics_port


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_port_that_is_taken_there_is_named(tmp_path: Path, host: str):
    with bound_listener("router.port", host, 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_free(config(tmp_path, port))
    assert f"router.port: [::1]:{port} is not available" in str(caught.value)


def test_the_unspecified_address_is_of_both_families():
    """A router at `::` serves clients of either, unless the system's net.ipv6.bindv6only says otherwise."""
    if Path("/proc/sys/net/ipv6/bindv6only").read_text().strip() != "0":
        pytest.skip("net.ipv6.bindv6only is set")
    with bound_listener("router.port", "::", 0) as listener:
        listener.listen()
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=120).close()
