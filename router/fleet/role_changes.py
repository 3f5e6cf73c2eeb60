"""Has agents change the roles of their workers as the load wants it (`role_changes` of cluster.yaml).

Several routers may run. All choose the same worker, since they see the same roles and go by names, and what one has
begun lets the others wait: a worker that drains or is not ready, or has another role than at the last look.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from cluster.config.router import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import WorkerView
from router.fleet.role_balance import OTHER, RecentSpending, role_loads, short_role, wanted_workers
from router.fleet.saturation import NONE_WAITS, Waiting
from router.metrics import Metrics

_LOOK_S = 1.0
_HELD_LOOKS = 3  # in a row that must want the same
PAUSE_S = 5.0  # after a change, whoever made it: loads must show what it did
_COMING_BACK = frozenset({"draining", "not_ready", "hung", "blocked"})  # conditions of workers that will count soon

Clock = Callable[[], float]

log = logging.getLogger(__name__)


class RoleChanges:
    """Looks at the loads each second. `explanation`: the last change that they wanted, and why."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: Metrics,
        is_dry_run: bool,
        clock: Clock = time.monotonic,
        waiting: Callable[[], Waiting] = lambda: NONE_WAITS,
    ) -> None:
        self._fleet, self._config, self._metrics, self._waiting = fleet, config, metrics, waiting
        self._is_dry_run, self._clock = is_dry_run, clock
        self._spending = RecentSpending()
        self._roles: dict[str, str] = {}  # at the last look
        self._quiet_until = 0.0
        self._wanted: deque[str | None] = deque(maxlen=_HELD_LOOKS)  # roles, at the last looks
        self._failed: set[tuple[str, str]] = set()  # workers and incarnations that did not change when they were asked
        self.explanation = ""

    async def run(self) -> None:
        """Look and act until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except Exception:  # the edge of this task
                log.exception("roles not looked at")

    async def look(self) -> None:
        """Take the loads in, and have at most one worker change its role."""
        fleet, now = self._fleet.state, self._clock()
        self._spending.look(now, fleet)
        views = [view for view in fleet.workers.values() if view.role in OTHER]
        roles = {view.name: view.role for view in views}
        if roles != self._roles:  # whoever changed them
            self._roles, self._quiet_until = roles, now + PAUSE_S
        loads = role_loads(fleet, self._spending, self._config.slo, self._waiting())
        for each, load in loads.items():
            self._metrics.wanted_workers.labels(each).set(wanted_workers(load))
        role = short_role(loads)
        giver = None if role is None else self._giver(views, role)
        self._wanted.append(None if giver is None else role)
        if role is None or giver is None or now < self._quiet_until or self._wanted.count(role) < _HELD_LOOKS:
            return
        self.explanation = (
            f"{giver.name} becomes {role}: prompts keep prefill workers {100 * loads['prefill'].share:.0f} % busy, "
            f"answers decode workers {100 * loads['decode'].share:.0f} %"
        )
        await self._change(giver, role)
        self._quiet_until = self._clock() + PAUSE_S

    def _giver(self, views: Sequence[WorkerView], role: str) -> WorkerView | None:
        """The worker that is to get the role; None if none may get it now.

        One that cluster.yaml gave this role comes first, and none that has adapters which no store has.
        """
        givers = [view for view in views if view.role != role]
        if not all(view.is_placeable for view in givers):
            return None
        if any(view.role == role and view.condition in _COMING_BACK for view in views):
            return None
        able = [view for view in givers if not view.residency.memory_only]
        found = [view for view in able if (view.name, view.incarnation) not in self._failed]
        if not found:  # all have failed: once more
            self._failed.clear()
        configured = {view.name: self._fleet.link_of(view).contact.endpoint.role for view in able}
        return max(found or able, key=lambda view: (configured[view.name] == role, view.name), default=None)

    async def _change(self, view: WorkerView, role: str) -> None:
        fields = {"worker": view.name, "from": view.role, "to": role, "why": self.explanation}
        log.info("would change role" if self._is_dry_run else "changing role", extra={"fields": fields})
        result = "dry_run"
        if not self._is_dry_run:
            result = await self._fleet.link_of(view).change_role(role, self._config.drain_timeout_s)
            if result != "done":
                self._failed.add((view.name, view.incarnation))
                log.warning("role not changed", extra={"fields": {**fields, "result": result}})
        self._metrics.role_changes.labels(view.role, role, result).inc()
