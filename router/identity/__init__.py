"""Authentication and authorization: keys, tokens, tenants, scopes, the audit log."""
