"""Times of stages from metrics pages."""

from __future__ import annotations

from bench.matrix.stages import means_ms, stages_in

PAGE = """# TYPE sglang:per_stage_req_latency_seconds histogram
sglang:per_stage_req_latency_seconds_sum{engine_type="prefill",stage="prefill_forward",tp_rank="0"} 0.5
sglang:per_stage_req_latency_seconds_count{engine_type="prefill",stage="prefill_forward",tp_rank="0"} 10.0
sglang:per_stage_req_latency_seconds_bucket{engine_type="prefill",stage="prefill_forward",le="1.0"} 10.0
sglang:per_stage_req_latency_seconds_sum{engine_type="prefill",stage="tokenize"} 0.25
sglang:per_stage_req_latency_seconds_count{engine_type="prefill",stage="tokenize"} 5.0
sglang:e2e_request_latency_seconds_sum{stage="other"} 3.0
"""


def test_the_time_in_a_stage_is_that_of_the_requests_between() -> None:
    before = stages_in(PAGE)
    assert before == {"prefill_forward": (0.5, 10.0), "tokenize": (0.25, 5.0)}
    after = {**before, "prefill_forward": (0.9, 20.0), "decode_transferred": (0.003, 1.0)}
    assert means_ms(before, after) == {"prefill_forward": 40.0, "decode_transferred": 3.0}
