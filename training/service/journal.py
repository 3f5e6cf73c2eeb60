"""The log of commands: one SQLite file, whose commits survive a power cut. Thread-safe.

A command is in it before its id is told, and its outcome before that is. Commands are numbered by their model's client;
the first one, number 0, creates the model and is written with it in one commit.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from training.executor.executor import Command
from training.executor.operations import Operation, Outcome, Spec, decode_operation, decode_outcome, encode

# Some builds of SQLite write zeros over what is deleted: for a model's commands, that took seconds.
_TABLES = """
PRAGMA secure_delete = OFF;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS records (kind TEXT NOT NULL, id TEXT NOT NULL, tenant TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (kind, id));
CREATE INDEX IF NOT EXISTS records_of_tenants ON records (kind, tenant);
CREATE TABLE IF NOT EXISTS commands (model TEXT NOT NULL, seq INTEGER NOT NULL, is_of_gradient INTEGER NOT NULL,
    operation BLOB, outcome BLOB, finished REAL, PRIMARY KEY (model, seq));
DELETE FROM commands WHERE model NOT IN (SELECT id FROM records WHERE kind = 'Model');
"""
_PUT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)"
_ADD = "INSERT OR IGNORE INTO commands VALUES (?, ?, ?, ?, ?, ?)"
_KEPT_S = 3600.0  # an outcome, once a snapshot has it: clients ask at once, and again if they lost the answer

Statement = tuple[str, tuple[Any, ...]]


class Record(msgspec.Struct, frozen=True):
    id: str
    tenant: str


class Session(Record, frozen=True):
    """Until it is finished."""


class Model(Record, frozen=True):
    session: str
    spec: Spec
    snapshot: int = -1  # the last command that a snapshot has; -1: none
    steps: int = 0  # up to it
    tokens: int = 0
    metadata: dict[str, str] | None = None  # the client's


class Checkpoint(Record, frozen=True):
    """Its id is a tinker:// path. `adapter`: with its revision, of weights for samplers."""

    spec: Spec
    folder: str  # below the service's; empty: it is of weights for samplers, which the router has
    adapter: str | None = None
    made_s: float = 0.0  # by the clock, as the next one
    expires_s: float | None = None
    metadata: dict[str, str] | None = None  # of its model
    scores_prompts: bool = False  # as of a Sampler


class Sampler(Record, frozen=True):
    """A sampling session. Without an adapter it samples the base model.

    `scores_prompts`: to read a sequence as a prompt says what would be sampled: answers are adapted, or nothing is.
    """

    session: str
    path: str | None = None
    adapter: str | None = None
    scores_prompts: bool = False


class Pushed(Record, frozen=True):
    """An alias that the router has, or may have, for a sampling session of this id: it is to be removed there."""

    model: str
    session: str
    adapter: str
    alias: str


R = TypeVar("R", bound=Record)


def _row(record: Record) -> tuple[str, str, str, bytes]:
    return type(record).__name__, record.id, record.tenant, encode(record)


class Journal:
    """Raises sqlite3.Error from every method, as when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._lock, self._opened_at = threading.Lock(), time.time()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.executescript(_TABLES)
        # The event loop reads, and must not wait for a disk: by SQLite's WAL, no reader waits for a writer.
        self._reading = threading.Lock()
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def close(self) -> None:
        with self._lock, self._reading:
            self._reader.close()
            self._database.close()

    def _write(self, *statements: Statement) -> int:
        """In one commit; returns how many rows the last statement changed."""
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            return [self._database.execute(*each).rowcount for each in statements][-1]

    def _read(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(text, values).fetchall()

    def check(self) -> None:
        """Write to the file."""
        self._write(("PRAGMA user_version = 1", ()))

    # Records

    def put(self, record: Record) -> None:
        self._write((_PUT, _row(record)))

    def get(self, kind: type[R], id: str) -> R | None:
        found = self._read("SELECT value FROM records WHERE kind = ? AND id = ?", kind.__name__, id)
        return msgspec.msgpack.decode(found[0][0], type=kind) if found else None

    def all(self, kind: type[R], tenant: str | None = None) -> list[R]:
        """`tenant`: whose; None: everybody's, read tenant by tenant, so that nobody waits for all of it."""
        text, name, whose = "SELECT rowid, value FROM records WHERE kind = ? AND tenant = ?", kind.__name__, [(tenant,)]
        if tenant is None:
            whose = self._read("SELECT DISTINCT tenant FROM records WHERE kind = ?", name)
        rows = [row for (each,) in whose for row in self._read(text, name, each)]
        return [msgspec.msgpack.decode(value, type=kind) for _, value in sorted(rows)]

    def tenants(self) -> set[str]:
        """Who has records, by lasting names."""
        return {tenant for (tenant,) in self._read("SELECT DISTINCT tenant FROM records")}

    def count(self, kind: type[Record], tenant: str) -> int:
        text = "SELECT COUNT(*) FROM records WHERE kind = ? AND tenant = ?"
        return self._read(text, kind.__name__, tenant)[0][0]

    def total(self, table: str, kind: type[Record] | None = None) -> int:
        """Rows of a table; of records, those of a kind."""
        return self._read(f"SELECT COUNT(*) FROM {table}" + (f" WHERE kind = '{kind.__name__}'" if kind else ""))[0][0]

    def change(self, kind: type[R], id: str, **fields: Any) -> None:
        """Nothing if it is gone."""
        with self._lock:
            if found := self.get(kind, id):
                values = encode(replace(found, **fields)), kind.__name__, id
                self._database.execute("UPDATE records SET value = ? WHERE kind = ? AND id = ?", values)

    def remove(self, record: Record) -> None:
        """Nothing if another one has taken its place."""
        with self._lock:
            if self.get(type(record), record.id) == record:
                self._database.execute("DELETE FROM records WHERE kind = ? AND id = ?", _row(record)[:2])

    def remove_session(self, session: str) -> None:
        """With its samplers."""
        samplers = "DELETE FROM records WHERE kind = 'Sampler' AND id GLOB ? || ':*'"
        self._write((samplers, (session,)), ("DELETE FROM records WHERE kind = 'Session' AND id = ?", (session,)))

    def add_model(self, model: Model, first: Operation) -> None:
        """With its first command."""
        self._write((_PUT, _row(model)), (_ADD, (model.id, 0, False, encode(first), None, None)))

    def remove_model(self, model: str) -> None:
        """With its commands, and what its last ones made of a session that had ended. Its checkpoints stay."""
        late = "DELETE FROM records WHERE kind = 'Sampler' AND substr(id, 1, instr(id, ':') - 1) NOT IN "
        self._write(
            (f"{late} (SELECT id FROM records WHERE kind = 'Session')", ()),
            ("DELETE FROM commands WHERE model = ?", (model,)),
            ("DELETE FROM records WHERE kind = 'Model' AND id = ?", (model,)),
        )

    # Commands

    def add(self, model: str, seq: int, operation: bytes | None, refusal: Outcome | None, is_of_gradient: bool) -> bool:
        """False if there is one of this number; it stays as it is."""
        outcome, finished = (None, None) if refusal is None else (encode(refusal), time.time())
        return bool(self._write((_ADD, (model, seq, is_of_gradient, operation, outcome, finished))))

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

    def finish(self, model: str, seq: int, outcome: Outcome, made: Record | None = None) -> None:
        """Write the outcome, if there is none yet, and what the command made, in one commit."""
        text = "UPDATE commands SET outcome = ?, finished = ? WHERE model = ? AND seq = ? AND outcome IS NULL"
        records = [] if made is None else [(_PUT, _row(made))]
        self._write(*records, (text, (encode(outcome), time.time(), model, seq)))

    def outcome(self, model: str, seq: int) -> Outcome | None:
        """None: there is none yet. Raises LookupError if there is no such command."""
        found = self._read("SELECT outcome FROM commands WHERE model = ? AND seq = ?", model, seq)
        if not found:
            raise LookupError(f"{model} has no command {seq}")
        return None if found[0][0] is None else decode_outcome(found[0][0])

    def forget(self, model: Model) -> None:
        """What the commands up to its snapshot did is there; and outcomes that could be asked for long enough."""
        place, long_ago = (model.id, model.snapshot), time.time() - _KEPT_S
        if self._opened_at > long_ago:
            long_ago = 0.0  # clients may have waited for this process to begin
        self._write(
            ("DELETE FROM commands WHERE model = ? AND seq <= ? AND finished < ?", (*place, long_ago)),
            ("UPDATE commands SET operation = NULL WHERE model = ? AND seq <= ? AND outcome IS NOT NULL", place),
            ("UPDATE records SET value = ? WHERE kind = 'Model' AND id = ?", (encode(model), model.id)),
        )
