"""API keys in the catalog: digests, never keys."""

import hmac
from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import insert, select, update

from adapters.catalog.api_keys import digest_of, new_key
from adapters.catalog.records import ApiKey
from adapters.catalog.sql.database import CatalogPart, Transaction
from adapters.catalog.sql.tables import AnyRow, api_keys
from adapters.catalog.sql.tenants import ensure_tenant
from adapters.errors import AccessNotFound, CatalogConflict
from adapters.scopes import Scope

MAX_NAME = 100  # characters


class SqlKeys(CatalogPart):
    """The keys of a catalog. Every method can raise CatalogUnavailable."""

    def create(
        self, tenant: str, name: str, scopes: Collection[Scope], *, expires_at: datetime | None, by: str | None
    ) -> tuple[ApiKey, str]:
        """Make a key; return its record and the key, which nobody can learn again. The tenant may be new.

        Raises InvalidReference for a tenant's name, and ValueError for a name, no scopes, or an expiry in the past.
        """
        if not (1 <= len(name) <= MAX_NAME and name.isprintable()):
            raise ValueError(f"a key's name has 1 to {MAX_NAME} printable characters (found {name[:MAX_NAME]!r})")
        if not scopes:
            raise ValueError("a key without any scope permits nothing; name at least one")
        key_id, key = new_key()

        def create(transaction: Transaction) -> ApiKey:
            if expires_at is not None and expires_at <= transaction.now:
                raise ValueError(f"the key would have expired already, at {expires_at:%Y-%m-%d %H:%M} UTC")
            ensure_tenant(transaction, tenant)
            row = {
                "key_id": key_id,
                "tenant": tenant,
                "name": name,
                "digest": digest_of(key).hex(),
                "scopes": ",".join(sorted(scopes)),
                "created_at": transaction.now,
                "created_by": by,
                "expires_at": expires_at,
                "changed": transaction.change("keys"),
            }
            connection = transaction.connection
            return key_of(connection.execute(insert(api_keys).returning(api_keys), row).one())

        return self._database.write(create), key

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key for good. Raises AccessNotFound, and CatalogConflict if it was revoked before."""

        def revoke(transaction: Transaction) -> ApiKey:
            connection = transaction.connection
            row = connection.execute(select(api_keys).where(api_keys.c.key_id == key_id)).first()
            if row is None:
                raise AccessNotFound(f"there is no key with the id {key_id[:80]!r}; `prelude keys list` shows ids")
            if row.revoked_at is not None:
                raise CatalogConflict(f"the key {key_id} was revoked on {row.revoked_at:%Y-%m-%d %H:%M} UTC")
            changed = {"revoked_at": transaction.now, "changed": transaction.change("keys")}
            one = update(api_keys).where(api_keys.c.key_id == key_id).values(changed).returning(api_keys)
            return key_of(connection.execute(one).one())

        return self._database.write(revoke)

    def list(self, tenant: str | None = None) -> Sequence[ApiKey]:
        """All keys, or a tenant's, revoked and expired ones included, the oldest first."""
        query = select(api_keys).order_by(api_keys.c.tenant, api_keys.c.created_at, api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        return self._database.read(lambda connection: [key_of(row) for row in connection.execute(query)])

    def changed_since(self, sequence: int) -> Sequence[ApiKey]:
        """The keys that were made or revoked by changes after that sequence."""
        query = select(api_keys).where(api_keys.c.changed > sequence)
        return self._database.read(lambda connection: [key_of(row) for row in connection.execute(query)])


def matches(key: ApiKey, digest: bytes) -> bool:
    """Whether it is the digest of that key, in constant time."""
    return hmac.compare_digest(key.digest, digest)


def key_of(row: AnyRow) -> ApiKey:
    """The record of a row of `api_keys`."""
    return ApiKey(
        key_id=row.key_id,
        tenant=row.tenant,
        name=row.name,
        digest=bytes.fromhex(row.digest),
        scopes=frozenset(Scope(each) for each in row.scopes.split(",")),
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
