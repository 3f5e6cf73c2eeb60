"""Configurations of clusters with few sections."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config.schema import ClusterConfig


def config_of(
    workers: Mapping[str, str | dict[str, Any]], model: str | Path | dict[str, Any] = "/m", **sections: Any
) -> ClusterConfig:
    """Of each worker its fields, or only its role; of the model its section, or only its folder."""
    listed = {name: {"role": each} if isinstance(each, str) else each for name, each in workers.items()}
    named = model if isinstance(model, dict) else {"path": model, "name": "demo"}
    return ClusterConfig.model_validate({"model": named, "workers": listed, **sections})
