"""Tenants, adapters, revisions, aliases and changes."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    name: TypeEngine[str] = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
    key: TypeEngine[int] = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    time: TypeEngine[datetime] = sa.DateTime(timezone=True)

    op.create_table(
        "tenants",
        sa.Column("name", name, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", key, sa.Identity(), nullable=False),
        sa.Column("tenant", name, nullable=False),
        sa.Column("name", name, nullable=False),
        sa.Column("last_number", sa.Integer, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("deleted_at", time),
        sa.Column("purged_at", time),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_adapters_tenant"),
        sa.UniqueConstraint("tenant", "name", name="uq_adapters_tenant_name"),
    )
    to_purge = sa.text("deleted_at IS NOT NULL AND purged_at IS NULL")
    op.create_index(
        "ix_adapters_to_purge", "adapters", ["deleted_at"], sqlite_where=to_purge, postgresql_where=to_purge
    )
    op.create_table(
        "manifests",
        sa.Column("id", key, sa.Identity(), nullable=False),
        sa.Column("digest", name, nullable=False),
        sa.Column("json", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_manifests"),
        sa.UniqueConstraint("digest", name="uq_manifests_digest"),
    )
    op.create_table(
        "revisions",
        sa.Column("id", key, sa.Identity(), nullable=False),
        sa.Column("revision_id", name, nullable=False),
        sa.Column("manifest_id", key, nullable=False),
        sa.Column("kinds", sa.Text, nullable=False),
        sa.Column("positions", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_revisions"),
        sa.ForeignKeyConstraint(["manifest_id"], ["manifests.id"], name="fk_revisions_manifest_id"),
        sa.UniqueConstraint("revision_id", name="uq_revisions_revision_id"),
    )
    op.create_table(
        "adapter_revisions",
        sa.Column("adapter_id", key, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("content_id", key, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "number", name="pk_adapter_revisions"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_adapter_revisions_adapter_id"),
        sa.ForeignKeyConstraint(["content_id"], ["revisions.id"], name="fk_adapter_revisions_content_id"),
        sa.UniqueConstraint("adapter_id", "content_id", name="uq_adapter_revisions_adapter_id_content_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_adapter_revisions_content_id", "adapter_revisions", ["content_id"])
    op.create_table(
        "aliases",
        sa.Column("adapter_id", key, nullable=False),
        sa.Column("alias", name, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("move", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_aliases"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_aliases_adapter_id"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "number"],
            ["adapter_revisions.adapter_id", "adapter_revisions.number"],
            name="fk_aliases_adapter_id_number",
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "alias_moves",
        sa.Column("adapter_id", key, nullable=False),
        sa.Column("alias", name, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("from_number", sa.Integer),
        sa.Column("to_number", sa.Integer, nullable=False),
        sa.Column("before", sa.BigInteger),
        sa.Column("moved_at", time, nullable=False),
        sa.Column("moved_by", sa.Text),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "sequence", name="pk_alias_moves"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_alias_moves_adapter_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "changes",
        sa.Column("sequence", key, autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("adapter_id", key),
        sa.Column("changed_at", time, nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_changes"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_changes_adapter_id"),
    )
    counter = op.create_table(
        "change_counter",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_change_counter"),
    )
    op.bulk_insert(counter, [{"id": 1, "last": 0}])
    op.create_table(
        "removals",
        sa.Column("revision_id", name, nullable=False),
        sa.Column("condemned_at", time, nullable=False),
        sa.Column("removed_sequence", sa.BigInteger),
        sa.PrimaryKeyConstraint("revision_id", name="pk_removals"),
    )
