"""Refuses an engine whose nodes have read different base models."""

from __future__ import annotations

from typing import Any

from adapters.model.base_weights import weights_digest


def check_same_weights(scheduler: Any) -> None:
    """Raise ValueError if ranks on other nodes have other files: together they would make nonsense.

    The schedulers of all ranks must call it.
    """
    if scheduler.server_args.nnodes == 1:
        return
    import torch
    import torch.distributed as dist

    model_path, overrides = scheduler.server_args.model_path, scheduler.server_args.json_model_override_args
    ranks = scheduler.tp_cpu_group
    own = torch.tensor(list(weights_digest(model_path, overrides).encode()), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(found, own, group=ranks)
    if others := [rank for rank, each in enumerate(found) if not torch.equal(each, own)]:
        raise ValueError(
            f"the base model in {model_path} differs from that of the ranks {others}, on other nodes: "
            "give all nodes of the engine the same files"
        )
