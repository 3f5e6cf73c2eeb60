"""A model of random weights satisfies every kind of schema that the router admits, on real engines at temperature 1."""

import json

import httpx
import jsonschema
from support.clusters.running_cluster import RunningCluster
from support.routers.admission import of_schema
from support.routers.enforced_schemas import ENFORCED

CHOICES, TOKENS = 3, 96


def test_whole_answers_satisfy_their_schema(cluster: RunningCluster) -> None:
    with_whole_answer = set()
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        for number, (schema, _, _) in enumerate(ENFORCED):
            body = {"model": "demo", "prompt": [20, 21, 22], "temperature": 1, "n": CHOICES, "max_tokens": TOKENS}
            answer = client.post("/v1/completions", json={**body, "response_format": of_schema(schema)})
            assert answer.status_code == 200, f"{schema}: {answer.text}"
            for choice in answer.json()["choices"]:
                # A model of random weights writes bytes that are no character; each is replaced in the text.
                if choice["finish_reason"] == "stop" and "\ufffd" not in choice["text"]:
                    with_whole_answer.add(number)
                    # A string with a length may hold control characters, as docs/api.md says.
                    value = json.loads(choice["text"], strict=False)
                    jsonschema.Draft202012Validator(schema).validate(value)
    print(f"{len(with_whole_answer)} of {len(ENFORCED)} schemas had whole answers")
    assert len(with_whole_answer) > len(ENFORCED) // 2
