"""Where a request went: the header of answers."""

from __future__ import annotations

import pytest
from support.router_stand_ins import MODEL, running_cluster


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("debug_header", [False, True])
async def test_the_header_is_answered_where_it_is_allowed(stream: bool, debug_header: bool) -> None:
    async with running_cluster(debug_header=debug_header) as cluster:
        url, body = f"{cluster.url}/v1/completions", {"model": MODEL, "prompt": "Hi", "adapter": "a0"}
        for asks in (True, False):
            headers = {"x-prelude-debug": "placement"} if asks else {}
            async with cluster.http.post(url, json={**body, "stream": stream}, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
                found = answer.headers.get("x-prelude-placement")
            assert found == ("p0>d0" if asks and debug_header else None)
