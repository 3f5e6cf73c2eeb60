"""Who is refused what, by a clock of the test's own."""

from typing import Any

import msgspec
import pytest
from support.routers.sharing_routers import ACME, BETA, caller
from support.routers.virtual_time import Clock

from cluster.config.quotas import QuotasConfig
from router.errors import QuotaExceeded, answer_of
from router.identity.access import Principal
from router.metrics import Metrics
from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate
from router.quotas import quotas as module
from router.quotas.budget import Use
from router.quotas.quotas import Quotas


def made(clock: Clock | None = None, metrics: Metrics | None = None, **config: Any) -> Quotas:
    return Quotas(QuotasConfig.model_validate(config), metrics or Metrics(), clock=clock or Clock(0))


def used(quotas: Quotas, who: Principal, **use: int) -> None:
    """A request that begins and ends, having used what it asked for."""
    asked = Use(**use)
    with quotas.admission(who) as admission:
        admission.take(asked)
        admission.settle(asked.prompt_tokens, asked.output_tokens)


def refused(quotas: Quotas, who: Principal, **use: Any) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        used(quotas, who, **use)
    return caught.value


@pytest.mark.parametrize(
    ("limit", "use"),
    [("prompt_tokens_per_min", {"prompt_tokens": 40}), ("output_tokens_per_min", {"output_tokens": 40})],
)
def test_tokens_per_minute(limit: str, use: dict[str, int]):
    clock = Clock(0)
    quotas = made(clock, default={limit: 60})
    used(quotas, ACME, **use)
    used(quotas, ACME, **use)  # one that takes more than is left
    error = refused(quotas, ACME, **use)
    assert error.retry_after_s == pytest.approx(21)
    assert error.headers["x-ratelimit-limit-tokens"] == "60"
    assert error.headers["x-ratelimit-remaining-tokens"] == "0"
    assert error.headers["x-ratelimit-reset-tokens"] == "1m20s"
    assert error.headers["retry-after-ms"] == "21000"
    answer = answer_of(error)
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "rate_limit_exceeded", "21")
    clock.now = 21
    used(quotas, ACME, **use)


def test_tokens_that_were_not_used_are_given_back_and_more_than_asked_for_is_owed():
    clock = Clock(0)
    quotas = made(clock, default={"prompt_tokens_per_min": 600, "output_tokens_per_min": 60})
    with quotas.admission(ACME) as admission:
        admission.take(Use(prompt_tokens=10, output_tokens=100_000))
        assert admission.headers()["x-ratelimit-remaining-tokens"] == "0"
        admission.settle(30, 5)
    assert quotas.budgets["tenant:acme"].buckets["output_tokens"].level == 55
    assert quotas.budgets["tenant:acme"].buckets["prompt_tokens"].level == 570
    with quotas.admission(ACME) as admission:
        admission.take(Use(output_tokens=1))
        admission.settle(0, 115)
    assert refused(quotas, ACME, output_tokens=1).retry_after_s == pytest.approx(61)
    with quotas.admission(BETA) as admission:
        admission.take(Use(output_tokens=20))
        admission.settle(None, None)  # unknown: as it was asked for
    assert quotas.budgets["tenant:beta"].buckets["output_tokens"].level == 40


@pytest.mark.parametrize(
    ("limits", "use", "message"),
    [
        ({"sequences": 16}, Use(sequences=17), "tenant acme has a limit of sequences of 16 at a time, .* 17, so"),
        ({"sequences": 16, "output_tokens_per_min": 60}, Use(sequences=17, output_tokens=60), "asks for 17"),
        ({"sequences": 1, "each_key": {"sequences": 16}}, Use(sequences=17), "tenant acme"),
    ],
)
def test_a_request_that_can_never_be_admitted_is_told_so(limits: dict[str, Any], use: Use, message: str):
    quotas, who = made(default=limits), caller("acme", "a" * 12)
    used(quotas, who, output_tokens=60, sequences=1)  # what it has taken is not the reason
    with quotas.admission(who) as admission, pytest.raises(QuotaExceeded, match=message) as caught:
        admission.take(use)
    answer = answer_of(caught.value)
    assert "never" in str(caught.value)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & set(answer.headers)


def test_a_refused_request_takes_nothing_but_its_place_among_requests():
    quotas = made(default={"prompt_tokens_per_min": 100, "sequences": 1, "requests_per_s": 10})
    with quotas.admission(ACME) as admission:
        admission.take(Use(prompt_tokens=10, sequences=1))
        refused(quotas, ACME, prompt_tokens=50, sequences=1)
    buckets = quotas.budgets["tenant:acme"].buckets
    assert (buckets["prompt_tokens"].level, buckets["requests"].level) == (90, 8)


def test_keys_have_their_own_limits_and_the_tenants():
    quotas = made(
        default={"requests_per_s": 3, "each_key": {"requests_per_s": 2}}, keys={"b" * 12: {"requests_per_s": 1}}
    )
    one, two = caller("acme", "a" * 12), caller("acme", "b" * 12)
    used(quotas, two)
    assert "key bbbbbbbbbbbb" in str(refused(quotas, two))
    used(quotas, one)
    used(quotas, one)
    assert "tenant acme" in str(refused(quotas, one))


def test_a_tenants_own_limits_replace_the_defaults_one_by_one():
    quotas = made(
        default={"requests_per_s": 1, "sequences": 1},
        tenants={"acme": {"requests_per_s": 5}, "beta": {"requests_per_s": None, "sequences": None}},
    )
    for _ in range(5):
        used(quotas, ACME, sequences=1)
    refused(quotas, ACME)
    refused(quotas, ACME, sequences=2)
    for _ in range(20):
        used(quotas, BETA, sequences=50)


def test_changes_are_limited_unless_that_is_turned_off():
    found = QuotasConfig.model_validate({"tenants": {"acme": {"changes_per_min": None}}})
    assert [found.of_tenant(each).changes_per_min for each in ("acme", "beta")] == [None, 120]


def test_idle_budgets_are_forgotten_and_busy_ones_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_BUDGETS", 10)
    clock = Clock(0)
    quotas = made(clock, default={"requests_per_s": 1, "sequences": 5, "output_tokens_per_min": 60})
    with quotas.admission(ACME) as admission:
        admission.take(Use(sequences=1, output_tokens=1))
        for number in range(30):
            clock.now += 2
            used(quotas, caller(f"t{number}"))
        assert len(quotas.budgets) < 20
        assert quotas.budgets["tenant:acme"].sequences.used == 1
        admission.settle(0, 600)
    assert quotas.budgets["tenant:acme"].sequences.used == 0
    assert quotas.budgets["tenant:acme"].buckets["output_tokens"].level == -539


def test_the_metrics_say_how_much_of_each_limit_is_used():
    clock, metrics = Clock(0), Metrics()
    limits = {"prompt_tokens_per_min": 100, "sequences": 4}
    quotas = made(clock, metrics, default=limits, tenants={"acme": {"sequences": 8}})
    used(quotas, ACME, prompt_tokens=80)
    used(quotas, BETA, prompt_tokens=30)
    used(quotas, caller("gamma"), prompt_tokens=60)
    with quotas.admission(ACME) as admission:
        admission.take(Use(sequences=2))
        assert metrics.quota_use.read() == {
            ("acme", "prompt_tokens"): pytest.approx(0.8),
            ("acme", "sequences"): 0.25,
            ("other", "prompt_tokens"): pytest.approx(0.6),  # the most of any
            ("other", "sequences"): 0,
        }
        assert 'prelude_router_quota_used_ratio{limit="sequences",tenant="acme"} 0.25' in metrics.page().decode()
        for who in (ACME, BETA, caller("gamma")):
            refused(quotas, who, sequences=7)
    page = metrics.page().decode()
    assert 'prelude_router_quota_refusals_total{limit="sequences",tenant="acme"} 1.0' in page
    assert 'prelude_router_quota_refusals_total{limit="sequences",tenant="other"} 2.0' in page
    assert 'prelude_router_tenant_tokens_total{kind="prompt",tenant="other"} 90.0' in page
    assert "gamma" not in page  # only tenants of the configuration are named
    clock.now = 60
    assert set(quotas.used_shares().values()) == {0}


# ---- how much an answer can have -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, None),
        ({"max_tokens": 80}, 160),
        ({"max_completion_tokens": 1}, 2),
        ({"max_completion_tokens": 1, "max_tokens": 80}, 160),  # engines heed `max_tokens` only in completions
    ],
)
def test_the_output_of_two_choices(limits: dict[str, int], most: int | None):
    body = msgspec.json.encode({"model": "m", "prompt": "Hi", "n": 2, "stream": True, **limits})
    validated = validate(Endpoint.COMPLETIONS, body, Limits(128, 32_000))
    assert validated.most_output_tokens == most
    assert Use.of(validated, 1).output_tokens == (512 if most is None else most)
