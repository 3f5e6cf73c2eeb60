"""The log of commands: one SQLite file, whose commits survive a power cut. Thread-safe.

A command is in it before its id is told, and its outcome before that is. Commands are numbered by their model's client;
the first one, number 0, creates the model and is written with it in one commit.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from training.executor.executor import Command
from training.executor.operations import Operation, Outcome, Spec, decode_operation, decode_outcome, encode

_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, is_finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, spec BLOB NOT NULL,
    snapshot INTEGER NOT NULL DEFAULT -1);
CREATE TABLE IF NOT EXISTS commands (model TEXT NOT NULL, seq INTEGER NOT NULL, is_of_gradient INTEGER NOT NULL,
    operation BLOB, outcome BLOB, told REAL, PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, tenant TEXT NOT NULL, spec BLOB NOT NULL,
    folder TEXT NOT NULL, adapter TEXT);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, path TEXT,
    adapter TEXT);
DELETE FROM commands WHERE model NOT IN (SELECT id FROM models);
"""
_KEPT_S = 3600.0  # an outcome that was told once, and that a snapshot has, for clients that lost the answer


class Model(NamedTuple):
    id: str
    tenant: str
    session: str
    spec: Spec
    snapshot: int  # the last command that a snapshot has; -1: none


class Checkpoint(NamedTuple):
    """What a tinker:// path names. `adapter`: with its revision, of weights for samplers."""

    path: str
    tenant: str
    spec: Spec
    folder: str
    adapter: str | None = None


class Sampler(NamedTuple):
    """A sampling session. Without an adapter it samples the base model."""

    id: str
    tenant: str
    session: str
    path: str | None
    adapter: str | None


class Journal:
    """Raises sqlite3.Error from every method, as when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.executescript(_TABLES)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> int:
        """In one commit; returns how many rows the last statement changed."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for text, values in statements:
                    changed = self._database.execute(text, values).rowcount
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
            return changed

    def _read(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(text, values).fetchall()

    # Sessions and models

    def add_session(self, session: str, tenant: str) -> None:
        self._write(("INSERT INTO sessions (id, tenant) VALUES (?, ?)", (session, tenant)))

    def session(self, session: str) -> tuple[str, bool] | None:
        """Its tenant, and whether it is finished."""
        found = self._read("SELECT tenant, is_finished FROM sessions WHERE id = ?", session)
        return (found[0][0], bool(found[0][1])) if found else None

    def sessions(self) -> list[str]:
        return [row[0] for row in self._read("SELECT id FROM sessions WHERE NOT is_finished")]

    def num_sessions(self, tenant: str) -> int:
        """That are not finished."""
        return self._read("SELECT COUNT(*) FROM sessions WHERE tenant = ? AND NOT is_finished", tenant)[0][0]

    def finish_session(self, session: str) -> None:
        self._write(
            ("DELETE FROM samplers WHERE session = ?", (session,)),
            ("UPDATE sessions SET is_finished = 1 WHERE id = ?", (session,)),
        )

    def add_model(self, model: Model, first: Operation) -> None:
        """With its first command. An existing one stays as it is."""
        row = (model.id, model.tenant, model.session, encode(model.spec))
        self._write(
            ("INSERT OR IGNORE INTO models (id, tenant, session, spec) VALUES (?, ?, ?, ?)", row),
            (_INSERT, (model.id, 0, 0, encode(first), None)),
        )

    def models(self) -> list[Model]:
        rows = self._read("SELECT id, tenant, session, spec, snapshot FROM models ORDER BY rowid")
        return [Model(*row[:3], msgspec.msgpack.decode(row[3], type=Spec), row[4]) for row in rows]  # type: ignore[call-arg]

    def remove_model(self, model: str) -> None:
        """With its commands. Its checkpoints stay."""
        self._write(("DELETE FROM commands WHERE model = ?", (model,)), ("DELETE FROM models WHERE id = ?", (model,)))

    # Commands

    def add(self, model: str, seq: int, operation: bytes | None, refusal: Outcome | None, is_of_gradient: bool) -> bool:
        """False if there is one of this number; it stays as it is."""
        return bool(self._write((_INSERT, (model, seq, is_of_gradient, operation, refusal and encode(refusal)))))

    def has(self, model: str, seq: int) -> bool:
        return bool(self._read("SELECT 1 FROM commands WHERE model = ? AND seq = ?", model, seq))

    def seqs(self, model: str) -> list[int]:
        return [row[0] for row in self._read("SELECT seq FROM commands WHERE model = ?", model)]

    def num_bytes(self, model: str) -> int:
        """Of its commands that a start would compute again."""
        return self._read("SELECT COALESCE(SUM(LENGTH(operation)), 0) FROM commands WHERE model = ?", model)[0][0]

    def operations(self, model: Model) -> Iterable[tuple[int, Operation]]:
        """Those that no snapshot has, or that are not finished."""
        text = "SELECT seq FROM commands WHERE model = ? AND operation IS NOT NULL ORDER BY seq"
        for (seq,) in self._read(text, model.id):
            command = self.command(model.id, seq)
            if command.operation is not None and (command.outcome is None or seq > model.snapshot):
                yield seq, command.operation

    def command(self, model: str, seq: int) -> Command:
        found = self._read(
            "SELECT operation, outcome, is_of_gradient FROM commands WHERE model = ? AND seq = ?", model, seq
        )
        operation, outcome, is_of_gradient = found[0] if found else (None, None, 0)
        return Command(
            None if operation is None else decode_operation(operation),
            None if outcome is None else decode_outcome(outcome),
            bool(is_of_gradient),
            len(operation or b""),
        )

    def finish(self, model: str, seq: int, outcome: Outcome, checkpoint: Checkpoint | Sampler | None = None) -> None:
        """Write the outcome, if there is none yet, and what it made, in one commit."""
        made: list[tuple[str, tuple[Any, ...]]] = []
        if isinstance(checkpoint, Checkpoint):
            row = (*checkpoint[:2], encode(checkpoint.spec), *checkpoint[3:])
            made = [("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?)", row)]
        elif isinstance(checkpoint, Sampler):
            made = [("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?)", tuple(checkpoint))]
        text = "UPDATE commands SET outcome = ? WHERE model = ? AND seq = ? AND outcome IS NULL"
        self._write(*made, (text, (encode(outcome), model, seq)))

    def tell(self, model: str, seq: int) -> Outcome | None:
        """The outcome, for the client; None: there is none yet. Raises LookupError if there is no such command."""
        found = self._read("SELECT outcome, told FROM commands WHERE model = ? AND seq = ?", model, seq)
        if not found:
            raise LookupError(f"{model} has no command {seq}")
        if found[0][0] is None:
            return None
        if found[0][1] is None:
            self._write(("UPDATE commands SET told = ? WHERE model = ? AND seq = ?", (time.time(), model, seq)))
        return decode_outcome(found[0][0])

    def forget(self, model: str, seq: int) -> None:
        """What the commands up to this one did is in a snapshot; and outcomes that were told long ago."""
        self._write(
            (
                "DELETE FROM commands WHERE model = ? AND seq <= ? AND told < ?",
                (model, seq, time.time() - _KEPT_S),
            ),
            (
                "UPDATE commands SET operation = NULL WHERE model = ? AND seq <= ? AND outcome IS NOT NULL",
                (model, seq),
            ),
            ("UPDATE models SET snapshot = ? WHERE id = ?", (seq, model)),
        )

    # Checkpoints and samplers

    def checkpoint(self, path: str) -> Checkpoint | None:
        found = self._read("SELECT path, tenant, spec, folder, adapter FROM checkpoints WHERE path = ?", path)
        if not found:
            return None
        path, tenant, spec, folder, adapter = found[0]
        return Checkpoint(path, tenant, msgspec.msgpack.decode(spec, type=Spec), folder, adapter)

    def num_checkpoints(self, tenant: str) -> int:
        return self._read("SELECT COUNT(*) FROM checkpoints WHERE tenant = ?", tenant)[0][0]

    def remove_checkpoint(self, path: str) -> None:
        self._write(("DELETE FROM checkpoints WHERE path = ?", (path,)))

    def add_sampler(self, sampler: Sampler) -> None:
        """An existing one stays as it is."""
        self._write(("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?)", tuple(sampler)))

    def sampler(self, sampler: str) -> Sampler | None:
        found = self._read("SELECT id, tenant, session, path, adapter FROM samplers WHERE id = ?", sampler)
        return Sampler(*found[0]) if found else None


_INSERT = "INSERT OR IGNORE INTO commands (model, seq, is_of_gradient, operation, outcome) VALUES (?, ?, ?, ?, ?)"
