"""Sections of cluster.yaml whose constants are others, for tests of what they bound."""

import functools
from typing import Any, TypeVar

from cluster.config.fields import Section

S = TypeVar("S", bound=Section)


def with_constants(section: type[S], **values: Any) -> S:
    """The section with these values. Of its constants, which cluster.yaml cannot set, too."""
    constants = {name: value for name, value in values.items() if name in section.__class_vars__}
    fields = {name: value for name, value in values.items() if name not in constants}
    return _changed(section, tuple(sorted(constants.items())))(**fields) if constants else section(**fields)


@functools.cache
def _changed(section: type[S], constants: tuple[tuple[str, Any], ...]) -> type[S]:
    """Kept, since Pydantic takes a while to make one."""
    return type(section.__name__, (section,), {"__module__": __name__, **dict(constants)})
