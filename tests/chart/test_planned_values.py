"""The values that `prelude plan` prints are taken by the chart, and become what the plan says."""

import json
from pathlib import Path

import pytest
import yaml
from support.chart.helm_chart import config_in, containers, merged, named, needs_helm, pods, render, scenario_values
from support.engines.model_sizes import LLAMA_70B

from cli.main import main

pytestmark = needs_helm
LOAD = "--requests-per-s 40 --prompt-tokens 1500 --generated-tokens 400 --working-set 3000"


@pytest.mark.parametrize("layout", ["pairs", "unified"])
def test_planned_values(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    command = ["plan", "--model", str(tmp_path), "--gpu", "h200", "--layout", layout, *LOAD.split()]
    main([*command, "--cluster-yaml"])
    plan = yaml.safe_load(capsys.readouterr().out)
    main([*command, "--helm-values"])
    values = yaml.safe_load(capsys.readouterr().out)
    others = scenario_values("h100-node") | {"pools": {}}  # where the catalog, the store and the model are
    objects = render(merged(others, values))
    found = {spec_labels["app.kubernetes.io/component"]: (name, spec) for name, spec, spec_labels in pods(objects)}
    for role, pool in plan["workers"].items():
        name, spec = found[role]
        kind, _, workload = name.partition("/")
        assert named(objects, kind, workload)["spec"]["replicas"] == pool.get("replicas", 1)
        (container,) = containers(spec)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == pool["gpus"]
        (shared,) = [each["emptyDir"] for each in spec["volumes"] if each["name"] == "shared-memory"]
        adapters = plan["residency"]["host_bytes"] if role != "decode" else 0
        mib = int(shared["sizeLimit"].removesuffix("Mi"))
        assert 0 <= mib * 1024**2 - adapters - 4 * 1024**3 < 2 * 1024**2
        (volume,) = [each for each in spec["volumes"] if "configMap" in each and "trusted" not in each["name"]]
        config = config_in(objects, volume["configMap"]["name"], tmp_path)
        engine = config.with_found_worker("w", role, "127.0.0.2").engine_of("w")
        assert engine.tensor_parallel == pool["gpus"]
        assert engine.model_dump().items() >= pool["engine"].items()
        assert config.adapter_limits.slots == plan["adapter_limits"]["slots"]
        assert config.residency.host_bytes == plan["residency"]["host_bytes"]
