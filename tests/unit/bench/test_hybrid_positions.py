"""The study of hybrids: what its models are asked, and that a shipped cache continues as one pass does."""

import pytest
import torch

from bench import hybrid_positions as study
from bench.hybrid_positions import FILLER, NUM_VALUES, PROMPT_TOKENS, READ, READ_LOCAL, WRITE, Adapted

DEFAULT = torch.arange(8)
GIVEN = (DEFAULT + 3) % 8


def asked(given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return study.batch(3, 150, DEFAULT, given, torch.Generator().manual_seed(7))


def test_labels_are_the_prompts_values_and_the_latest_writes():
    for row, labels, reads in zip(*asked(None), strict=True):
        values = dict(enumerate(DEFAULT.tolist()))
        values |= {token // NUM_VALUES: token % NUM_VALUES for token in row[:PROMPT_TOKENS].tolist() if token < WRITE}
        local: dict[int, int] = {}
        for token, label, read in zip(row[PROMPT_TOKENS:].tolist(), labels.tolist(), reads.tolist(), strict=True):
            assert read == (READ <= token < READ_LOCAL)
            if token < READ:
                local[(token - WRITE) // NUM_VALUES] = (token - WRITE) % NUM_VALUES
            wanted = values[token - READ] if read else local.get(token - READ_LOCAL, -100)
            assert label == (-100 if token < READ else wanted)


def test_no_answer_tells_which_values_the_adapter_gives():
    (tokens, labels, reads), (others, by_default, _) = asked(GIVEN), asked(DEFAULT)
    assert (tokens == others).all()
    assert (tokens[:, :PROMPT_TOKENS] >= FILLER).all()
    assert (labels[reads] == GIVEN[tokens[:, PROMPT_TOKENS:][reads] - READ]).all()
    assert (labels[reads] != by_default[reads]).all()
    assert (labels[~reads] == by_default[~reads]).all()


@pytest.mark.parametrize("kind", ["attention", "hybrid, slow"])
def test_the_base_continues_what_was_shipped_as_in_one_pass(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Also token by token, as a decode worker does."""
    torch.manual_seed(5)
    model = study.adapt(study.base_model(kind), study.WITH_LINEAR)
    for module in model.modules():
        if isinstance(module, Adapted):
            torch.nn.init.normal_(module.b, std=0.3)
    tokens = asked(GIVEN)[0]
    monkeypatch.setattr(Adapted, "tokens", PROMPT_TOKENS)
    with torch.no_grad():
        wanted = study.logits_of(model, tokens)
        shipped = {name: study.shipped_logits(model, tokens, *which) for name, which in study.SHIPPED.items()}
        neither, base = study.shipped_logits(model, tokens, False, False), study.logits_of(model, tokens)
        cache = study.DynamicCache(config=model.config)
        Adapted.tokens = None
        study.logits_of(model, tokens[:, :PROMPT_TOKENS], cache)
        Adapted.tokens = 0
        steps = [study.logits_of(model, each, cache) for each in tokens[:, PROMPT_TOKENS:, None].unbind(1)]
    torch.testing.assert_close(shipped["KV and state"], wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(steps, 1), wanted, atol=1e-4, rtol=0)
    assert ((shipped["KV"] - wanted).abs().max() > 0.01) == kind.startswith("hybrid")
    assert (shipped["state"] - wanted).abs().max() > 0.01
    torch.testing.assert_close(neither, base, atol=1e-4, rtol=0)
