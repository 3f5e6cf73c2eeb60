"""Hooks into SGLang: `ledger` lists them, `installation` applies and verifies them."""
