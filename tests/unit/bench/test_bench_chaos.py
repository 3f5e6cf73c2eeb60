"""What the chaos benchmark aims at, and how it counts what clients saw."""

from __future__ import annotations

import pytest

from bench.chaos import QUICK, Options, Seen, _targets
from cli.main import main


def test_every_process_of_each_role_is_a_target() -> None:
    parts = ("agent", "server", "scheduler", "detokenizer")
    of_pair = [("", "router"), *(("prefill-0", part) for part in parts), *(("decode-0", part) for part in parts)]
    assert _targets(Options()) == of_pair
    assert _targets(Options(layout="unified")) == [("", "router"), *(("unified-0", part) for part in parts)]
    assert _targets(QUICK) == [("unified-0", "scheduler")]


def test_a_wrong_answer_is_an_outcome_of_its_own() -> None:
    seen = Seen()
    for outcome, seconds in (("answered", 3.0), ("wrong answer", 1.0), ("503 no_worker_available", 0.1)):
        seen.add(outcome, seconds)
    assert (seen.num_wrong, seen.longest_s, sum(seen.outcomes.values())) == (1, 3.0, 3)
    assert seen.outcomes["wrong answer"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--signals", "kill,nuke"], "there is no nuke; there are kill, stop"),
        (["--parts", "gpu"], "there is no gpu"),
        (["--in-flight", "many"], "is no list of numbers"),
    ],
)
def test_wrong_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chaos", *words])
    assert says in f"{ended.value.code} {capsys.readouterr().err}"
