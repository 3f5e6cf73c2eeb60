"""Single prompts for the base model, one after the other, and the small cluster that is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.load.options import Endpoint
from bench.load.strict import closed_load
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Stream, Workload
from cluster.config.schema import ClusterConfig

_VOCABULARY = 400  # of the tokenizer that is written with each model


class SinglePrompts:
    """So many different prompts of one length. Other seeds begin otherwise, so no prefix of theirs is cached."""

    def __init__(self, url: str, prompt_tokens: int, count: int, seed: int = 1) -> None:
        self._endpoint = Endpoint(url, "bench")
        workload = Workload("single", "", "", lengths=FixedLengths(prompt_tokens, 2), vocabulary=_VOCABULARY)
        self._sessions = iter(Stream(workload, seed, 0).sessions(count))

    async def first_token_ms(self) -> float:
        """Send the next one; the time to its first token. Raises SystemFailed."""
        [record] = await closed_load(self._endpoint, [next(self._sessions)], 1)
        return 1000 * record.ttft_s


def small_cluster(
    folder: Path,
    workers: Mapping[str, Mapping[str, object]],
    *,
    device: str,
    max_total_tokens: int,
    engine_arguments: Sequence[str],
    name: str = "cluster",
) -> ClusterConfig:
    """A cluster of the model in `folder`/model. `name` tells clusters in one folder apart."""
    fields: dict[str, Any] = {
        "model": {"path": folder / "model", "name": "bench", "dtype": "bfloat16"},
        "engine": {
            "device": device,
            "max_total_tokens": max(4096, max_total_tokens),
            "max_running_requests": 8,
            "extra_arguments": list(engine_arguments),
        },
        "router": {"port": 0},
        "workers": workers,
        "catalog": {"url": f"sqlite:///{folder}/{name}.db"},
        "store": {"url": f"file://{folder}/{name}-store"},
        "residency": {"host_bytes": 1 << 28},
    }
    return ClusterConfig.model_validate(fields)
