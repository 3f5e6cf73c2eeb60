"""Metrics of the trainer."""

from collections import Counter as Counts
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from training.executor.executor import STATES
from training.executor.operations import Export, Failure, Load, Operation, Outcome, Pass, Save, Scored, Spec, Step

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_KINDS = {Spec: "create", Load: "load", Step: "step", Save: "save", Export: "export"}


def _number(states: Callable[[], Counts[str]], state: str) -> float:
    return states()[state]


class TrainerMetrics:
    """Counted by the commands' log and the pushes; what is there now is read when it is asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self.commands = counter("prelude_trainer_commands", "Commands by outcome", ("kind", "result"))
        self.tokens = counter("prelude_trainer_tokens", "Tokens of passes")
        self.queue_seconds = histogram("prelude_trainer_queue_seconds", "Wait of a command to be computed")
        self.command_seconds = histogram("prelude_trainer_command_seconds", "Time to compute a command", ("kind",))
        self.replays = counter("prelude_trainer_replays", "Commands computed again after a start")
        self.push_seconds = histogram("prelude_trainer_push_seconds", "Time of a push to the catalog", ("result",))
        self._models = gauge("prelude_trainer_models", "Models by state", ("state",))
        self._now = {
            name: gauge(f"prelude_trainer_{name}", text)
            for name, text in {
                "model_bytes": "Memory of parameters and moments",
                "commands_kept": "Commands and outcomes in the log",
                "sampler_aliases": "Aliases of sampling sessions in the catalog",
                "log_bytes": "Size of the log",
                "free_disk_bytes": "Free space for log, checkpoints and snapshots",
                "start_time_seconds": "When the trainer started",
            }.items()
        }

    def watch(self, states: Callable[[], Counts[str]], **now: Callable[[], float]) -> None:
        """Ask these for what is there now: models by state, and the other gauges by name."""
        for state in STATES:
            self._models.labels(state).set_function(partial(_number, states, state))
        for name, value in now.items():
            self._now[name].set_function(value)

    def finished(self, operation: Operation | None, outcome: Outcome, computed_s: float | None) -> None:
        """Count a command. `computed_s`: None if nothing was computed just now."""
        kind = "unknown"  # of what was refused
        if isinstance(operation, Pass):
            kind = "forward" if operation.forward_only else "forward_backward"
            if isinstance(outcome, Scored):
                self.tokens.inc(operation.num_tokens)
        elif operation is not None:
            kind = _KINDS[type(operation)]
        result = "done"
        if isinstance(outcome, Failure):
            result = "refused" if outcome.is_users else "failed"
        self.commands.labels(kind, result).inc()
        if computed_s is not None:
            self.command_seconds.labels(kind).observe(computed_s)
