"""API keys, grants between tenants, the audit log, and adapters whose prefixes tenants share."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name: TypeEngine[str] = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
    key: TypeEngine[int] = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    time: TypeEngine[datetime] = sa.DateTime(timezone=True)

    # With a default, so that a process of the release before this one can go on importing.
    op.add_column("adapters", sa.Column("shares_prefixes", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "api_keys",
        sa.Column("key_id", name, nullable=False),
        sa.Column("tenant", name, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", name, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("created_by", sa.Text),
        sa.Column("expires_at", time),
        sa.Column("revoked_at", time),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_api_keys_tenant"),
    )
    op.create_index("ix_api_keys_changed", "api_keys", ["changed"])
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])
    op.create_table(
        "grants",
        sa.Column("owner", name, nullable=False),
        sa.Column("name", name, nullable=False),
        sa.Column("grantee", name, nullable=False),
        sa.Column("permission", name, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("created_by", sa.Text),
        sa.PrimaryKeyConstraint("owner", "name", "grantee", "permission", name="pk_grants"),
        sa.ForeignKeyConstraint(["owner"], ["tenants.name"], name="fk_grants_owner"),
        sa.ForeignKeyConstraint(["grantee"], ["tenants.name"], name="fk_grants_grantee"),
    )
    op.create_index("ix_grants_grantee", "grants", ["grantee"])
    op.create_table(
        "audit_events",
        sa.Column("id", key, sa.Identity(), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("tenant", name),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object", sa.Text),
        sa.Column("old", sa.Text),
        sa.Column("new", sa.Text),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
    )
