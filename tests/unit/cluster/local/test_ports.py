"""Ports that `prelude up` chooses: the router's admin listener comes after the router, unless that port is taken."""

import socket
from typing import Any

import pytest
from support.clusters.configs import config_of
from support.ports import two_ports

from cluster.config.router import RouterConfig
from cluster.config.schema import ClusterConfig, TrainerConfig
from cluster.errors import ConfigError, StartError
from cluster.local.ports import check_free, with_ports


def chosen(router: dict[str, Any], **worker: Any) -> ClusterConfig:
    return with_ports(config_of({"u": {"role": "unified", **worker}}, router=router))


def test_the_admin_listener_comes_after_the_router():
    port = two_ports()
    config = chosen({"port": port})
    assert config.router.admin_port == config.router.admin.port == port + 1
    check_free(config)
    assert RouterConfig(port=8000).admin_port == 8001
    assert RouterConfig(port=65535).admin_port == RouterConfig(port=0).admin_port == 0  # any free one


def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(StartError, match=r"opened at no-such-host.invalid: .*; workers.u.control_port needs one"):
        chosen({"port": 0}, host="no-such-host.invalid")
    with pytest.raises(StartError, match=r"opened at 192.0.2.1: Cannot assign .*; router.port needs one"):
        chosen({"port": 0, "host": "192.0.2.1"})


def test_a_port_that_is_taken_or_a_workers_is_not_chosen():
    port = two_ports()
    with socket.create_server(("127.0.0.1", port + 1)):
        assert chosen({"port": port}).router.admin_port not in (0, port + 1)
    assert chosen({"port": port}, control_port=port + 1).router.admin_port not in (0, port + 1)
    assert chosen({"port": port, "admin": {"port": 0}}).router.admin_port not in (0, port)


def test_a_port_that_was_given_is_kept_and_named_if_it_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        config = chosen({"port": 0, "admin": {"port": taken}})
        assert config.router.admin_port == taken
        with pytest.raises(ConfigError, match=rf"router.admin.port: 127.0.0.1:{taken} is not available"):
            check_free(config)
        trainer = TrainerConfig(url=f"http://127.0.0.1:{taken}")
        with pytest.raises(ConfigError, match=rf"trainer.url: 127.0.0.1:{taken} is not available"):
            check_free(chosen({"port": 0}).model_copy(update={"trainer": trainer}))
