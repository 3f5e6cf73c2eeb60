"""The catalog: adapters, their revisions and aliases."""
