"""Limits that routers share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name: TypeEngine[str] = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
    op.create_table(
        "quota_members",
        sa.Column("member", name, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("member", name="pk_quota_members"),
    )
    op.create_table(
        "quota_pools",
        sa.Column("subject", name, nullable=False),
        sa.Column("level", sa.Double, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("full_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("subject", name="pk_quota_pools"),
    )
    op.create_index("ix_quota_pools_full_at", "quota_pools", ["full_at"])
    op.create_table(
        "quota_holdings",
        sa.Column("subject", name, nullable=False),
        sa.Column("member", name, nullable=False),
        sa.Column("wanted", sa.Double, nullable=False),
        sa.Column("held", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("subject", "member", name="pk_quota_holdings"),
    )
    op.create_index("ix_quota_holdings_member", "quota_holdings", ["member"])
