"""Names of tenants that were deleted: whoever has the name next finds nothing of theirs in prefix caches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name: TypeEngine[str] = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
    op.create_table(
        "tenant_generations",
        sa.Column("digest", name, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_tenant_generations"),
    )
