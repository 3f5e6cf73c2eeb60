"""What tenants, keys and adapters have used at this router; a background task writes it to the catalog's database."""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from adapters.catalog.usage import Counts, Subject
from adapters.errors import AdapterError
from process.lifetime import meanwhile

_FLUSH_S = 5.0  # what `kill -9` loses
_BATCH = 1000  # rows of a transaction
MAX_ROWS = 100_000  # in memory; more subjects are not counted while the database is away

log = logging.getLogger(__name__)

Put = Callable[[Sequence[tuple[Subject, Counts]]], Awaitable[None]]


class Usage:
    """Counts by subject. `rows` are added to by whoever ends a request. Use from one event loop.

    Rows are written as they are and not added to what is there, under an id that no other process has. So a write whose
    outcome is unknown is repeated, and nothing is counted twice.
    """

    def __init__(self, put: Put, clock: Callable[[], float] = time.time) -> None:
        """`put` writes to the database, as `SqlUsage.put`."""
        self._put = put
        self.clock = clock
        self.rows: defaultdict[Subject, Counts] = defaultdict()
        self._written: dict[Subject, int] = {}  # requests of each row, when it was written last
        self._begin_id()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Write inside the block, and once more at its end."""
        return meanwhile(self._run(), then=self.flush)

    async def flush(self) -> bool:
        """Write the rows that have changed. False if that failed; they stay."""
        written = self._written
        changed = [key for key, row in self.rows.items() if row.requests != written.get(key)]
        for start in range(0, len(changed), _BATCH):
            # Copies, since they are written in another thread.
            batch = [(key, replace(self.rows[key])) for key in changed[start : start + _BATCH]]
            try:
                await self._put(batch)
            except Exception as error:  # noqa: BLE001  # whatever it is, requests go on, and it is tried again
                reason = str(error) if isinstance(error, AdapterError) else type(error).__name__
                log.error("usage not written", extra={"fields": {"rows": len(changed), "reason": reason}})
                return False
            written |= {key: row.requests for key, row in batch}
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop what is written and of another hour, or, of too many rows, all that is written."""
        hour, are_many = int(self.clock() // 3600), len(self.rows) > MAX_ROWS // 2
        kept, written = self.rows, self._written
        old = [key for key in kept if (are_many or key.hour != hour) and kept[key].requests == written.get(key)]
        for key in old:
            del kept[key], written[key]
        if old:
            self._begin_id()

    def _begin_id(self) -> None:
        """New rows get another id: one of a subject that was dropped, as when the clock is set back, begins at 0."""
        self.rows.default_factory = partial(Counts, router=secrets.token_hex(8))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self.flush()
