"""References: the ways to name an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.router_stand_ins import DIRECTORIES, managed_adapters

from adapters.errors import AdapterMalformed, AdapterNotFound
from router.errors import ConflictingAdapters, InvalidField, UnknownModel
from router.identity.access import ANYBODY
from router.revisions.adapter_service import reference_in, resolve


@pytest.mark.parametrize(
    ("model", "adapter", "reference"),
    [
        ("base", None, None),
        ("base", "a0", "a0"),
        ("base", "t/a0@prod", "t/a0@prod"),
        ("base:a0", None, "a0"),
        ("base:a0", "a0", "a0"),
        ("base:t/a0@sha256:ab", None, "t/a0@sha256:ab"),
        ("a0", None, "a0"),
        ("a0@prod", None, "a0@prod"),
        ("a0", "a0", "a0"),
        ("baseline", None, "baseline"),
    ],
)
def test_forms(model: str, adapter: str | None, reference: str | None) -> None:
    assert reference_in(model, adapter, "base") == reference


@pytest.mark.parametrize(("model", "adapter"), [("base:a0", "a1"), ("a0", "a1"), ("a0", "a0@latest")])
def test_conflicts(model: str, adapter: str) -> None:
    with pytest.raises(ConflictingAdapters):
        reference_in(model, adapter, "base")


def test_nothing_after_the_colon() -> None:
    with pytest.raises(InvalidField):
        reference_in("base:", None, "base")


async def test_resolution(tmp_path: Path) -> None:
    adapters = managed_adapters(tmp_path, **DIRECTORIES)
    adapters.open()
    async with adapters.following():
        assert (await resolve("base", None, "base", adapters, ANYBODY)) is None
        revision = await resolve("base:a0", None, "base", adapters, ANYBODY)
        assert revision is not None
        assert revision.name == "a0"
        with pytest.raises(UnknownModel, match=r"'everywher' does not exist.*did you mean 'everywhere'"):
            await resolve("everywher", None, "base", adapters, ANYBODY)
        for model, adapter in (("base:a9", None), ("base", "a9"), ("a9", "a9")):
            with pytest.raises(AdapterNotFound):
                await resolve(model, adapter, "base", adapters, ANYBODY)
        with pytest.raises(AdapterMalformed):
            await resolve("broken", None, "base", adapters, ANYBODY)
