"""What all requests of a router share, so that no tenant takes all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import RouterError


class Room:
    """So much of something at a time. A tenant may have half of it, or one request that takes more.

    Nothing waits for room: who gets none is refused. Everywhere, a tenant that is None is who crosses tenants: such
    requests may have all of it.
    """

    def __init__(self, most: int, what: str, error: type[RouterError], remedy: str = "ask for less at once") -> None:
        """`remedy`: for a request that takes more than there is."""
        self.num_held = 0
        self._most = most
        self._what = what
        self._error = error
        self._remedy = remedy
        self._held: dict[str, int] = {}  # by tenant

    def take(self, tenant: str | None, amount: int, *, has: int = 0) -> None:
        """Take more for a request that has some, until `give_back`. Raises the error, without taking anything."""
        if has + amount > self._most:
            error = self._error(
                f"the request takes {has + amount} {self._what}, and this router may have {self._most}: {self._remedy}"
            )
            error.retryable = False
            raise error
        if self.num_held + amount > self._most:  # how much others have is none of a tenant's business
            raise self._error(
                f"this router may have {self._most} {self._what} at a time, too few for {amount} more now; try again "
                "soon"
            )
        if tenant is not None and amount:
            held = self._held.get(tenant, 0)
            if held > has and held + amount > self._most // 2:
                raise self._error(
                    f"the requests of tenant {tenant} in flight have {held} {self._what}; with {amount} more they are "
                    f"more than the {self._most // 2} that one tenant may have: try again soon"
                )
            self._held[tenant] = held + amount
        self.num_held += amount

    def give_back(self, tenant: str | None, amount: int) -> None:
        """Release what `take` has taken."""
        self.num_held -= amount
        if tenant is not None and amount:
            if left := self._held[tenant] - amount:
                self._held[tenant] = left
            else:
                del self._held[tenant]

    @contextmanager
    def held(self, tenant: str | None, amount: int) -> Iterator[None]:
        """Have room inside the block."""
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.give_back(tenant, amount)
