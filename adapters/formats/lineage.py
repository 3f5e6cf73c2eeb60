"""Where an adapter is from, in a line that its revision keeps.

`prelude adapters convert` writes it into the adapter's file; of a download, the import knows it.
"""

import re

from adapters.formats.json_file import Fields
from adapters.identity import is_revision_id

KEY = "converted"
_CONVERTED = "converted from "
_DOWNLOADED = "downloaded from "
BEGINNINGS = (_CONVERTED, _DOWNLOADED)  # of the lines that a revision keeps
_SHA256 = re.compile("[0-9a-f]{64}")


def lineage_of(fields: Fields) -> tuple[str, ...]:
    """A line for the revision, if there is something to say. Raises AdapterMalformed."""
    if not fields.values.get(KEY):
        return ()
    ours = Fields(fields.object(KEY), f"{fields.where}: {KEY}")
    teacher, data = ours.string("from", ""), ours.string("data", "")
    if not is_revision_id(teacher or ""):
        raise ours.wrong("from", "a revision id, 'sha256:' and 64 lower-case hex digits")
    if not _SHA256.fullmatch(data or ""):
        raise ours.wrong("data", "64 lower-case hex digits")
    agreement = ours.number("agreement", -1)
    if not 0 <= agreement <= 1:
        raise ours.wrong("agreement", "a number from 0 to 1")
    return (f"{_CONVERTED}{teacher} for the prompt only, agreement {agreement:.3f}, data sha256:{data}",)


def downloaded_from(place: str) -> str:
    """The line of a revision that was downloaded. `place` names a commit, which never changes."""
    return f"{_DOWNLOADED}{place}"
