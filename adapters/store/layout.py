"""The keys in a store.

revisions/<first two hex digits>/<64 hex digits>     one object per revision, complete or absent
incoming/<uuid>                                      being written; garbage once its writer is gone
quarantine/<64 hex digits>.<uuid>                    damaged; kept for inspection
"""

import re
import uuid

from adapters.identity import check_revision_id

REVISIONS, INCOMING, QUARANTINE = "revisions", "incoming", "quarantine"
_REVISION_KEY = re.compile(rf"{REVISIONS}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})")


def digits_of(revision_id: str) -> str:
    """The 64 hex digits of a revision id. Raises ValueError for anything else."""
    check_revision_id(revision_id)
    return revision_id.removeprefix("sha256:")


def key_of(revision_id: str) -> str:
    """The key of a revision's object."""
    digits = digits_of(revision_id)
    return f"{REVISIONS}/{digits[:2]}/{digits}"


def revision_of(key: str) -> str | None:
    """The revision whose object has this key; None for any other key."""
    match = _REVISION_KEY.fullmatch(key)
    return None if match is None else f"sha256:{match[2]}"


def new_incoming_key() -> str:
    return f"{INCOMING}/{uuid.uuid4().hex}"


def new_quarantine_key(revision_id: str) -> str:
    return f"{QUARANTINE}/{digits_of(revision_id)}.{uuid.uuid4().hex}"
