import hypothesis.strategies as st
import pytest
from hypothesis import given

from adapters.errors import InvalidReference
from adapters.identity import (
    AdapterReference,
    folder_of,
    is_revision_id,
    revision_of,
    scaled_id,
    split_adapter_name,
    split_scaled_id,
)

DIGEST = "sha256:" + "0123456789abcdef" * 4
PARTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)


@pytest.mark.parametrize("name", ["a", "A0", "support-bot", "v1.2_x", "acme/support", "9/9", "a" * 63, "a" * 63 + "/b"])
def test_names_that_are_accepted(name):
    split_adapter_name(name)


@pytest.mark.parametrize(
    "name", ["", "a b", ".a", "-a", "a/", "/a", "a/b/c", "a:b", "a@b", "a" * 64, "ä", "a\n", "a/../b"]
)
def test_names_that_are_refused(name):
    with pytest.raises(ValueError, match=r"is not an adapter name.*begins with a letter or digit"):
        split_adapter_name(name)
    if name != "a@b":
        with pytest.raises(InvalidReference):
            AdapterReference.parse(name)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("bot", AdapterReference("default", "bot", "latest")),
        ("acme/bot", AdapterReference("acme", "bot", "latest")),
        ("bot@prod", AdapterReference("default", "bot", "prod")),
        ("acme/bot@r7", AdapterReference("acme", "bot", None, number=7)),
        (f"bot@{DIGEST}", AdapterReference("default", "bot", None, revision_id=DIGEST)),
        ("bot@r0", AdapterReference("default", "bot", "r0")),  # revisions count from 1, so this is an alias
        ("bot@release", AdapterReference("default", "bot", "release")),
    ],
)
def test_references(text, reference):
    assert AdapterReference.parse(text) == reference


WRONG = ["bot@", "@prod", "bot@a@b", f"bot@{DIGEST[:-1]}", f"bot@{DIGEST.upper()}", "bot@a/b", "a" * 300, None, ["b"]]


@pytest.mark.parametrize("text", WRONG)
def test_references_that_are_refused(text):
    with pytest.raises(InvalidReference) as caught:
        AdapterReference.parse(text)
    assert caught.value.http_status == 400
    assert not caught.value.retryable
    assert len(str(caught.value)) < 600


def test_a_revision_at_a_scale_has_one_id():
    ids = [scaled_id(DIGEST, steps / 20) for steps in range(1, 41)]
    assert len(set(ids)) == 40
    assert (ids[0], ids[9], ids[19], ids[39]) == (f"{DIGEST}x0.05", f"{DIGEST}x0.5", DIGEST, f"{DIGEST}x2")
    assert [split_scaled_id(each) for each in ids] == [(DIGEST, steps / 20) for steps in range(1, 41)]
    assert {revision_of(each) for each in ids} == {DIGEST}
    assert len({folder_of(each) for each in ids}) == 40


WRONG_SCALES = [
    "x", "x1", "x0", "x-1", "x0.50", "x.5", "x00.5", "x5e-1", "x0.07", "x2.05", "xnan", "xinf", "x1.1.1", "x/../",
    "0.5", "X0.5", "x0.5x0.5", "x\u0661", "x0.5\n",
]  # fmt: skip


@pytest.mark.parametrize("scale", WRONG_SCALES)
def test_scales_that_are_refused(scale):
    for function in (split_scaled_id, folder_of):
        with pytest.raises(ValueError, match="is not a revision id, perhaps with a scale"):
            function(DIGEST + scale)


@given(st.text(max_size=80))
def test_no_text_crashes(text):
    try:
        reference = AdapterReference.parse(text)
    except InvalidReference:
        return
    assert AdapterReference.parse(str(reference)) == reference


@given(PARTS, PARTS, st.one_of(PARTS, st.just(DIGEST), st.integers(1, 999).map("r{}".format)))
def test_references_survive_their_own_spelling(tenant, name, pin):
    reference = AdapterReference.parse(f"{tenant}/{name}@{pin}")
    assert AdapterReference.parse(str(reference)) == reference
    assert (reference.tenant, reference.name) == (tenant, name)


def test_folder_names():
    assert folder_of(DIGEST) == DIGEST.replace(":", "-")
    assert is_revision_id(DIGEST)
    for wrong in ("", "sha256:", DIGEST + "0", "sha256:../../etc", DIGEST.replace("a", "A")):
        assert not is_revision_id(wrong)
        with pytest.raises(ValueError, match="is not a revision id"):
            folder_of(wrong)
