"""Room that requests share: a request gets what it asks for, or nothing; a tenant gets half."""

import pytest

from router.errors import RouterExhausted
from router.protocol.request_body import Room


def room(most: int = 100) -> Room:
    return Room(most, "things", RouterExhausted, "raise it")


def test_one_tenant_leaves_half_to_others() -> None:
    found = room()
    found.take("a", 40)
    with pytest.raises(RouterExhausted, match=r"tenant a .* 40 things; with 11 more .* 50"):
        found.take("a", 11)
    found.take("a", 10)
    found.take("b", 50)
    with pytest.raises(RouterExhausted, match="may have 100 things at a time, too few for 1 more"):
        found.take(None, 1)
    with pytest.raises(RouterExhausted, match="takes 101 things, and this router may have 100: raise it"):
        found.take(None, 61, has=40)
    for tenant, amount in (("b", 50), ("a", 10), ("a", 40)):
        found.give_back(tenant, amount)
    found.take(None, 60)
    found.take(None, 40)


def test_a_tenant_s_only_request_may_have_more_than_half() -> None:
    """Else one that other limits allow would be refused for ever where the room is small."""
    found = room()
    found.take("a", 40)
    found.take("a", 40, has=40)
    with pytest.raises(RouterExhausted, match="tenant a in flight have 80 things"):
        found.take("a", 1)
    found.take("a", 0)  # nothing is no more
