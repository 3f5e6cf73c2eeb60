"""What a process itself runs out of, and how a router's descriptors are divided."""

import errno
import os
import resource
import socket
import ssl

import pytest
from support.descriptors import no_descriptors

from process.exhaustion import RouterDescriptors, is_exhaustion, is_exhaustion_text, raise_open_files
from process.lifetime import is_alive


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_what_this_host_lacks(number: int):
    assert is_exhaustion(OSError(number, os.strerror(number)))
    assert is_exhaustion_text(f"last error: UNKNOWN: ipv4:127.0.0.1:1: socket: {os.strerror(number)} ({number})")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        TimeoutError(),
        ssl.SSLError(errno.ENOMEM, "a number of its own"),
        socket.gaierror(socket.EAI_NONAME, "no such host"),
        None,
    ],
)
def test_what_others_do(error: BaseException | None):
    assert not is_exhaustion(error)
    assert not is_exhaustion_text(str(error))


def test_a_name_is_not_missing_where_the_resolver_cannot_open_its_files():
    error = socket.gaierror(socket.EAI_NONAME, "no such host")
    with no_descriptors():
        found = is_exhaustion(error)
    assert found


def test_a_process_is_alive_without_descriptors():
    with no_descriptors():
        assert is_alive(os.getpid())


@pytest.mark.parametrize("limit", [256, 1024, 4096, 20_000, 32_048, 65_536, 1_048_576])
def test_descriptors_are_divided_within_the_limit(limit: int):
    wanted = RouterDescriptors.wanted(10_000)
    found = wanted.within(limit)
    left = limit - found.clients - found.engines
    assert left >= min(2048, limit // 2)  # for what is neither
    assert found.engines >= found.clients >= min(limit // 4, 8976)
    assert (found == wanted) is (limit >= wanted.limit)


def test_the_limit_is_raised_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard != resource.RLIM_INFINITY
    assert hard > 600
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert raise_open_files(600) == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
        assert raise_open_files(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600  # never lowered
        assert raise_open_files(hard + 1) == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
