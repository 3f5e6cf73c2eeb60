"""Bounds the connections to engines that requests in flight may have, all together and those of one tenant."""

from __future__ import annotations

from collections.abc import Callable

from router.errors import RouterExhausted


class EngineRoom:
    """A request takes room for all of its engine calls before the first one, or is refused whole.

    Calls that were refused one by one would have occupied engines in vain, and broken streams.
    """

    def __init__(self, most: int, on_refused: Callable[[], None] = lambda: None) -> None:
        self._most = most
        self._on_refused = on_refused
        self._num_held = 0
        self._held: dict[str, int] = {}  # by tenant

    def take(self, tenant: str | None, num_connections: int) -> None:
        """Take room until `give_back`. Raises RouterExhausted.

        `tenant`: may have half of the room, or one request that takes more; None: may have all of it.
        """
        held = 0 if tenant is None else self._held.get(tenant, 0)
        wanted = held + num_connections
        if self._num_held + num_connections > self._most or (held and wanted > self._most // 2):
            self._on_refused()
            raise RouterExhausted(
                self._why_not(tenant, num_connections, held), is_passing=num_connections <= self._most
            )
        self._num_held += num_connections
        if tenant is not None:
            self._held[tenant] = wanted

    def give_back(self, tenant: str | None, num_connections: int) -> None:
        """Release what `take` has taken."""
        self._num_held -= num_connections
        if tenant is not None:
            if left := self._held[tenant] - num_connections:
                self._held[tenant] = left
            else:
                del self._held[tenant]

    def _why_not(self, tenant: str | None, wanted: int, held: int) -> str:
        most = self._most
        if wanted > most:
            return (
                f"the request takes {wanted} connections to engines, and this router may have {most}: ask for fewer "
                "choices or prompts at once, or raise the router's limit of open files"
            )
        if self._num_held + wanted > most:
            return f"this router may have {most} connections to engines, too few for {wanted} more now; try again soon"
        return (
            f"the requests of tenant {tenant} in flight take {held} connections to engines; with the {wanted} of "
            f"this one they are more than the {most // 2} that one tenant may have: try again soon"
        )
