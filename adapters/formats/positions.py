"""Which positions an adapter is applied to: what its files say, or who imports it.

An adapter that says nothing was trained at all positions, as peft and what is built on it train. On the prompt alone it
would compute something that it never learned.
"""

from dataclasses import replace
from typing import Literal, cast

from adapters.errors import AdapterUnsupported
from adapters.formats.json_file import Fields
from adapters.model.normal_form import POSITIONS, Adapter, Positions

GivenPositions = Literal["prefill"]  # all that somebody may ask for who imports an adapter

_UNSTATED = (
    "its files do not say for which positions it was trained, so it is applied at all of them, as peft trains: only "
    "unified workers serve it, at about four fifths of the throughput of one for the prompt (docs/adapter-formats.md)"
)


def stated_positions(fields: Fields) -> tuple[Positions, Positions | None, tuple[str, ...]]:
    """(positions, trained_positions, warnings) of an adapter by the fields of these names. Raises AdapterMalformed."""
    positions, trained = _stated(fields, "positions"), _stated(fields, "trained_positions")
    if positions is None:
        return "all", None, (_UNSTATED,)
    return positions, None if trained == positions else trained, ()


def _stated(fields: Fields, key: str) -> Positions | None:
    value = fields.string(key)
    if value not in (None, *POSITIONS):
        raise fields.wrong(key, " or ".join(map(repr, POSITIONS)))
    return cast("Positions | None", value)


def applied(adapter: Adapter, given: GivenPositions | None, *, serves_all_positions: bool) -> Adapter:
    """The adapter as it will be applied: to the given positions, else to its own.

    Raises AdapterUnsupported for all positions where no worker serves them.
    """
    if given is not None and given != adapter.positions:
        others = tuple(each for each in adapter.warnings if each != _UNSTATED)
        warning = (
            f"it is applied to the prompt only, as was asked for, but was trained at {adapter.positions} positions: "
            "its answers can be much worse; compare them (prelude train eval --compare-positions), or convert it"
        )
        return replace(adapter, positions=given, trained_positions=adapter.positions, warnings=(*others, warning))
    if adapter.positions == "all" and not serves_all_positions:
        raise AdapterUnsupported(
            ("its files do not say otherwise, so " if _UNSTATED in adapter.warnings else "")
            + "the adapter is applied at all positions, which only a unified worker can do, and this cluster has none. "
            "Convert it to one for the prompt (prelude adapters convert), or add a unified worker. If it was trained "
            'for the prompt, say so in its configuration ("positions": "prefill"); to apply it there nevertheless, '
            "import it with --positions prefill"
        )
    return adapter
