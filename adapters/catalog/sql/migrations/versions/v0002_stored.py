"""Content that no store has: it is in workers' memory only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # With a default, so that a process of the release before this one can go on importing.
    op.add_column("revisions", sa.Column("stored", sa.Boolean, nullable=False, server_default=sa.true()))
