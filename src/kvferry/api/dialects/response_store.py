"""Stored responses, for the next turns of their conversations: bounded in number, bytes and time.

One SQLite database: a file that all routers of a port share, or in memory. A response belongs to the key with which it
was requested, and no other key can see that it exists. The least recently used one is dropped first.
"""

from __future__ import annotations

import logging
import sqlite3
import weakref
import zlib
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner BLOB NOT NULL, session TEXT NOT NULL, items BLOB NOT NULL, response BLOB NOT NULL,
    used REAL NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
"""


class StoredResponse(msgspec.Struct, frozen=True):
    """A response. `items`: JSON of its input with all earlier turns, compressed; `response`: JSON; `session`: the id of
    the first response of its conversation, which the router uses as the session."""

    id: str
    owner: bytes
    session: str
    items: bytes
    response: bytes

    def input_items(self) -> list[dict[str, Any]]:
        """The items of its input and of all earlier turns. Takes milliseconds for long conversations."""
        items: list[dict[str, Any]] = msgspec.json.decode(zlib.decompress(self.items))
        return items


def compress_items(items: list[dict[str, Any]]) -> bytes:
    """The items as a response is stored with them. Takes milliseconds for long conversations."""
    return zlib.compress(msgspec.json.encode(items), 1)


class ResponseStore:
    """The database. Used by one event loop. Each statement waits for the lock of the file for at most
    `max_lock_wait_ms`, and usually takes less than a millisecond."""

    max_lock_wait_ms = 500

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        *,
        max_responses: int = 10_000,
        max_bytes: int = 2**28,
        ttl_s: float = 86400.0,
    ) -> None:
        """`path`: a file in a folder that only this user can read; None: in memory. `ttl_s`: seconds for which a
        response is kept after its last use."""
        self._clock = clock
        self._max_responses, self._max_bytes, self._ttl_s = max_responses, max_bytes, ttl_s
        self._database = sqlite3.connect(
            ":memory:" if path is None else str(path),
            isolation_level=None,
            timeout=self.max_lock_wait_ms / 1000,
            check_same_thread=False,  # the garbage collector may close it from any thread
        )
        self._close = weakref.finalize(self, self._database.close)
        if path is not None:  # survives the death of any process; need not survive the machine's
            self._run("PRAGMA journal_mode = WAL")
            self._run("PRAGMA synchronous = OFF")
        for statement in _SCHEMA.split(";")[:-1]:
            self._run(statement)

    def close(self) -> None:
        """Close the database."""
        self._close()

    def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """A response of this owner, which is then the most recently used one. Raises `Unavailable`."""
        now = self._clock.monotonic()
        rows = self._run(
            "UPDATE responses SET used = ? WHERE id = ? AND owner = ? AND used > ?"
            " RETURNING id, owner, session, items, response",
            now, response_id, owner, now - self._ttl_s,
        )  # fmt: skip
        return StoredResponse(*rows[0]) if rows else None

    def put(self, stored: StoredResponse) -> None:
        """Store a response, and delete the least recently used ones while there are too many responses or bytes. Only
        logs a warning if this response alone has too many bytes, or if the database is locked."""
        now, size = self._clock.monotonic(), len(stored.items) + len(stored.response)
        if size > self._max_bytes:
            logger.warning(
                "a response of %d bytes is not stored: all stored responses together may have %d", size, self._max_bytes
            )
            return
        try:
            self._run(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                stored.id, stored.owner, stored.session, stored.items, stored.response, now, size,
            )  # fmt: skip
            self._run("DELETE FROM responses WHERE used <= ?", now - self._ttl_s)
            while self._is_full():
                self._run("DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY used, rowid LIMIT 1)")
        except Unavailable as error:
            logger.warning("a response is not stored: %s", error)

    def delete(self, response_id: str, owner: bytes) -> bool:
        """Delete a response of this owner; False if there is none. Raises `Unavailable`."""
        return bool(self._run("DELETE FROM responses WHERE id = ? AND owner = ? RETURNING 1", response_id, owner))

    def statistics(self) -> dict[str, int]:
        """Number of responses and of their bytes."""
        [[number, size]] = self._run("SELECT count(*), coalesce(sum(size), 0) FROM responses")
        return {"responses": int(number), "bytes": int(size)}

    def _is_full(self) -> bool:
        totals = self.statistics()
        return totals["responses"] > self._max_responses or totals["bytes"] > self._max_bytes

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the stored responses cannot be reached: {error}; try again") from error
