"""Write what 0.1.0 (commit 8f84249) read in the files beside this one, in a checkout of it, with its environment:

PYTHONPATH=. .venv/bin/python /path/to/generate.py
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.config_file import load_cluster_config
from pydantic import BaseModel

FOLDER = Path(__file__).resolve().parent


def check_complete(section: BaseModel) -> None:
    """No field is left at its default."""
    for name, field in type(section).model_fields.items():
        if name == "bootstrap_port" and section.role != "prefill":
            continue
        value = getattr(section, name)
        assert value != field.get_default(call_default_factory=True), f"{type(section).__name__}.{name}"
        for each in value.values() if isinstance(value, dict) else [value]:
            if isinstance(each, BaseModel):
                check_complete(each)


for name in ("cluster", "smallest"):
    config = load_cluster_config(FOLDER / f"{name}-0.1.0.yaml")
    if name == "cluster":
        check_complete(config)
    said = {"config": config.model_dump(mode="json")}
    said["engines"] = {worker: config.engine_of(worker).model_dump(mode="json") for worker in config.workers}
    text = json.dumps(said, indent=1).replace(str(FOLDER), "{folder}")
    (FOLDER / f"{name}-0.1.0.json").write_text(text + "\n")
