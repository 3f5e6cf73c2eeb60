"""Pools whose workers span several nodes: groups of a LeaderWorkerSet, whose leaders are the workers."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.chart.custom_resources import strictly_valid
from support.chart.helm_chart import (
    FULLNAME,
    Object,
    config_in,
    named,
    needs_helm,
    of_kind,
    rendered,
    scenario_values,
    selects,
    texts,
)

from cli.main import _parser, _with_this_worker
from cluster.agent.engine_spec import engine_spec, other_node
from engine.arguments import EngineSpec, command, environment

pytestmark = needs_helm
SCENARIO = "two-node-decode"
DECODE = f"{FULLNAME}-decode-main"
# What the controller puts into every container of a group's second pod.
INJECTED = {
    "$(POD_NAME)": f"{DECODE}-0-1",
    "$(POD_IP)": "10.1.2.3",
    "$(LWS_WORKER_INDEX)": "1",
    "$(LWS_LEADER_ADDRESS)": f"{DECODE}-0.{DECODE}.ns",
}


def group() -> Object:
    return named(rendered(SCENARIO), "LeaderWorkerSet", DECODE)


def templates() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the leader, which is the worker, and of the other nodes."""
    both = group()["spec"]["leaderWorkerTemplate"]
    return both["leaderTemplate"], both["workerTemplate"]


@pytest.mark.parametrize(
    ("place", "key"), [((), "maxSurge"), (("leaderWorkerTemplate", "leaderTemplate", "spec"), "hostNetworks")]
)
def test_validation_is_strict(place: tuple[str, ...], key: str):
    wrong = copy.deepcopy(group())
    target = wrong["spec"]
    for each in place:
        target = target[each]
    target[key] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError), match=key):
        strictly_valid(wrong, "1.29")


def test_a_group_lives_and_dies_together():
    spec = group()["spec"]
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"  # a leader is not ready before the others are up
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    scaler = named(rendered(SCENARIO), "HorizontalPodAutoscaler", DECODE)["spec"]["scaleTargetRef"]
    assert scaler == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": DECODE}
    budget = named(rendered(SCENARIO), "PodDisruptionBudget", DECODE)["spec"]["selector"]
    assert all(selects(budget, each["metadata"]["labels"]) for each in templates())


def specs(folder: Path) -> tuple[EngineSpec, EngineSpec]:
    """What the containers' commands start, by the processes' own code."""
    found = []
    for template in templates():
        args = template["spec"]["containers"][0]["args"]
        for variable, value in INJECTED.items():
            args = [each.replace(variable, value) for each in args]
        arguments = _parser().parse_args(args)
        config = _with_this_worker(config_in(rendered(SCENARIO), DECODE, folder), arguments)
        spec = engine_spec(config, arguments.name, folder)
        if arguments.node_rank:
            spec = other_node(spec, config.workers[arguments.name], arguments.node_rank, arguments.first_node)
        found.append(spec)
    return found[0], found[1]


def test_ranks_meet_at_the_leader(tmp_path: Path):
    leader, other = specs(tmp_path)
    assert (list(leader.local_ranks), list(other.local_ranks)) == (list(range(8)), list(range(8, 16)))
    for spec, rank, place in ((leader, "0", "10.1.2.3:9014"), (other, "1", f"{DECODE}-0.{DECODE}.ns:9014")):
        words = command(spec)
        flags = dict(pairwise(words))
        assert (flags["--nnodes"], flags["--node-rank"], flags["--dist-init-addr"]) == ("2", rank, place)
        assert flags["--tp-size"] == "16"
        assert environment(spec, {})["SGLANG_HOST_IP"] == "10.1.2.3"  # where KV reaches this node
    assert (leader.host, other.host) == ("10.1.2.3", "127.0.0.1")  # no one asks another node for anything
    ports = {each["name"]: each["containerPort"] for each in templates()[0]["spec"]["containers"][0]["ports"]}
    assert ports["rendezvous"] == 9014


def test_routers_find_leaders_only_and_kv_peers_all(tmp_path: Path):
    objects = rendered(SCENARIO)
    leader, other = (each["metadata"]["labels"] for each in templates())
    by_name = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    matched = {
        name: (selects(each["selector"], leader), selects(each["selector"], other)) for name, each in by_name.items()
    }
    assert {name: found for name, found in matched.items() if any(found)} == {
        f"{FULLNAME}-decode": (True, False),
        f"{FULLNAME}-decode-node": (False, True),
    }
    assert by_name[f"{FULLNAME}-decode-node"]["publishNotReadyAddresses"]
    config = config_in(rendered(SCENARIO), f"{FULLNAME}-prefill-main", tmp_path).with_found_worker(
        "p", "prefill", "10.1.2.9", 9000
    )
    peers = engine_spec(config, "p", tmp_path).kv_peers
    assert {f"{name}.ns.svc.cluster.local" for name, found in matched.items() if any(found)} <= set(peers or ())


def test_another_node_has_no_more_than_it_needs():
    leader, other = (each["spec"] for each in templates())
    assert [each["name"] for each in other["containers"][0]["ports"]] == ["metrics"]
    assert "tls" in {each["name"] for each in leader["volumes"]}
    assert "tls" not in {each["name"] for each in other["volumes"]}
    assert "envFrom" not in other["containers"][0]
    for spec in (leader, other):
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_pools_of_one_node_are_as_before():
    found = named(rendered(SCENARIO), "StatefulSet", f"{FULLNAME}-prefill-main")
    text = yaml.safe_dump(found)
    assert "node-rank" not in text
    assert (
        "rendezvous" not in named(rendered(SCENARIO), "ConfigMap", f"{FULLNAME}-prefill-main")["data"]["cluster.yaml"]
    )


def test_notes_say_it():
    notes = texts(scenario_values(SCENARIO))["prelude/templates/NOTES.txt"]
    assert "decode main: 1 x 16 GPUs, each over 2 nodes (LeaderWorkerSet)" in notes
    assert "prefill main: 2 x 8 GPUs\n" in notes
