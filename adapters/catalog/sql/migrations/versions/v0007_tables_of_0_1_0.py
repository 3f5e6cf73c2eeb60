"""The tables of release 0.1.0. Later steps follow it; a new catalog gets the tables as they are now, at once."""

from __future__ import annotations

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None: ...
