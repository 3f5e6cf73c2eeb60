"""What was sampled here, by a hash of prompt and sample: where answers begin in sequences of which nobody says it.

One SQLite file, apart from the log. Its commits survive a `kill -9`, and maybe no power cut: they wait for no disk.
"""

import hashlib
import logging
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_KEPT = 262_144  # samples of a tenant, some 60 bytes each: the newest
_MAX_LENGTHS = 32_000  # SQLite takes so many values in a statement

_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS rollouts (tenant TEXT NOT NULL, digest BLOB NOT NULL, length INTEGER NOT NULL,
    prompt INTEGER NOT NULL, sampled REAL NOT NULL, PRIMARY KEY (tenant, digest)) WITHOUT ROWID;
"""

Answers = tuple[tuple[int, int], ...]  # [first, end) of targets
Find = Callable[[np.ndarray], Answers]

log = logging.getLogger(__name__)


class Rollouts:
    """Thread-safe. A tenant's samples are found in its own data only."""

    def __init__(self, path: Path) -> None:
        """Begins anew if the file is damaged. Raises sqlite3.Error."""
        self._lock = threading.Lock()
        try:
            self._open(path)
        except sqlite3.OperationalError:  # as of a full disk
            raise
        except sqlite3.DatabaseError as error:
            log.warning("samples of before are not known", extra={"fields": {"file": str(path), "error": str(error)}})
            self._database.close()
            for damaged in path.parent.glob(f"{path.name}*"):
                damaged.unlink()
            self._open(path)

    def _open(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.executescript(_TABLES)
        self._counts, self._lengths = Counter[str](), defaultdict[str, set[int]](set)  # of tenants
        text = "SELECT tenant, length, COUNT(*) FROM rollouts GROUP BY tenant, length"
        for tenant, length, count in self._database.execute(text):
            self._counts[tenant] += count
            self._lengths[tenant].add(length)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def add(self, tenant: str, prompt: Sequence[int], samples: Sequence[Sequence[int]]) -> None:
        """What a full disk does not take is not known: only data that say nothing themselves need it."""
        wholes, now_s = [np.array([*prompt, *sample], np.int32) for sample in samples], time.time()
        rows = [(tenant, _digests(each, [len(each)])[0], len(each), len(prompt), now_s) for each in wholes]
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?)", rows)
                self._lengths[tenant].update(row[2] for row in rows)
                self._counts[tenant] += len(rows)
                if self._counts[tenant] > _KEPT:
                    self._drop_old(tenant)
        except sqlite3.Error as error:
            log.warning("samples were not noted", extra={"fields": {"tenant": tenant, "error": str(error)}})

    def _drop_old(self, tenant: str) -> None:  # an eighth, so that it is seldom
        newest = "SELECT sampled FROM rollouts WHERE tenant = ? ORDER BY sampled LIMIT 1 OFFSET ?"
        text = f"DELETE FROM rollouts WHERE tenant = ? AND sampled <= ({newest})"
        self._database.execute(text, (tenant, tenant, _KEPT // 8))
        count = self._database.execute("SELECT COUNT(*) FROM rollouts WHERE tenant = ?", (tenant,))
        self._counts[tenant] = count.fetchone()[0]

    def tenants(self) -> set[str]:
        """Who has samples, by lasting names."""
        with self._lock:
            return set(self._counts)

    def remove(self, is_removed: Callable[[str], bool]) -> None:
        """All samples of these tenants. Raises sqlite3.Error."""
        with self._lock:
            for tenant in [each for each in self._counts if is_removed(each)]:
                self._database.execute("DELETE FROM rollouts WHERE tenant = ?", (tenant,))
                self._counts.pop(tenant, None)
                self._lengths.pop(tenant, None)

    def find(self, tenant: str, sequence: np.ndarray) -> Answers:
        """The tenant's samples in a sequence, int32 [num_tokens]."""
        with self._lock:
            lengths = sorted(each for each in self._lengths[tenant] if each <= len(sequence))[-_MAX_LENGTHS:]
        digests = _digests(sequence, lengths)
        text = f"SELECT length, prompt FROM rollouts WHERE tenant = ? AND digest IN ({','.join('?' * len(digests))})"
        with self._lock:
            found = self._database.execute(text, (tenant, *digests)).fetchall()
        answers: list[tuple[int, int]] = []
        begins = len(sequence)
        for length, prompt in sorted(found, reverse=True):  # of two that overlap, the longer one is in this sequence
            if length <= begins and 1 <= prompt < length:
                begins = prompt
                answers.append((prompt - 1, length - 1))
        return tuple(reversed(answers))


def _digests(sequence: np.ndarray, lengths: Sequence[int]) -> list[bytes]:
    """Of the first tokens of a sequence, for each of these lengths, which ascend."""
    hashed, done, digests = hashlib.blake2b(digest_size=16), 0, []
    for length in lengths:
        hashed.update(sequence[done:length].astype("<i4").tobytes())
        digests.append(hashed.copy().digest())
        done = length
    return digests
