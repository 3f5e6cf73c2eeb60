"""Checks the fields and names of management requests."""

from collections.abc import Collection

from adapters import identity
from adapters.formats.positions import GivenPositions
from router.errors import InvalidField


def check_not_base_model(name: str, base_model: str, param: str) -> None:
    """Raises InvalidField if an adapter has the base model's name."""
    try:
        identity.check_not_base_model(name, base_model)
    except ValueError as error:
        raise InvalidField(str(error), param=param) from None


def given_positions(value: str | None) -> GivenPositions | None:
    """The positions that an import asks for; None: the adapter's own. Raises InvalidField."""
    if value is None:
        return None
    if value == "prefill":
        return "prefill"
    raise InvalidField(
        f"positions is {value[:64]!r}; it can be 'prefill', to apply the adapter to the prompt only although its files "
        "do not say that it was trained for it, or absent",
        param="positions",
    )


def check_known(given: Collection[str], known: Collection[str]) -> None:
    """Raises InvalidField for the first unknown name."""
    for name in given:
        if name not in known:
            expected = ", ".join(known) if known else "none"
            raise InvalidField(f"{name[:64]!r} is not known here; known are: {expected}", param=name[:64])
