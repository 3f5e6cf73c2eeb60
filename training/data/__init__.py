"""Rows of JSONL files to token ids: the context and the answers of every trained turn."""
