"""What an import warned of is shown with the revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_revisions", sa.Column("warnings", sa.Text, nullable=False, server_default=""))
