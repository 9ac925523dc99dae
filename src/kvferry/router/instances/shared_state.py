"""What the routers of one port know together: the instances, who has registered, the tickets that are kept for next
turns, and which routers there are.

One SQLite database: a file in the folder of the routers' group, or in memory for a router alone. There is no leader and
nobody is waited for: each router writes what happened to it, and looks a few times a second for what others wrote. What
is written outlives the router that wrote it. Owns the connection; knows instances only as rows.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvferry.core.entropy import token_hex
from kvferry.core.errors import Unavailable
from kvferry.router.instances.instance import LegRole

_LOCKED_MS = 500
"""How long another router may hold the database: it does so for microseconds, unless it was stopped just then."""
_MAX_FORMER_NAMES = 4096
_MAX_USED = 2**16
"""Signed requests of half a minute that are remembered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS routers (pid INTEGER PRIMARY KEY, started REAL NOT NULL, url TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, role TEXT NOT NULL, url TEXT NOT NULL,
    bootstrap_port INTEGER NOT NULL, draining INTEGER NOT NULL DEFAULT 0, drained INTEGER NOT NULL DEFAULT 0,
    remove_when_drained INTEGER NOT NULL DEFAULT 0, unit TEXT NOT NULL DEFAULT '',
    declared INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS former_names (
    role TEXT NOT NULL, url TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (role, url));
CREATE TABLE IF NOT EXISTS idle (
    pid INTEGER NOT NULL, member INTEGER NOT NULL, PRIMARY KEY (pid, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (url TEXT PRIMARY KEY, process TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tickets (
    session TEXT PRIMARY KEY, member INTEGER NOT NULL, engine_id TEXT NOT NULL, transfer_id TEXT NOT NULL,
    params BLOB NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS used (nonce TEXT PRIMARY KEY, at_ns INTEGER NOT NULL) WITHOUT ROWID;
"""


class MemberRow(NamedTuple):
    """One instance. `id` is never used again; `remove_when_drained`: it is removed once it is drained; `unit`: it hands
    off within that only; `declared`: a fleet's controller decides about it."""

    id: int
    name: str
    role: LegRole
    url: str
    bootstrap_port: int
    draining: bool
    drained: bool
    remove_when_drained: bool
    unit: str
    declared: bool


class LeaseRow(NamedTuple):
    """The process that registered a URL; `until` on the machine's monotonic clock, which all routers share."""

    process: str
    until: float


class TicketRow(NamedTuple):
    """What a decode instance (`member`) keeps for a conversation's next turn; `params` is JSON."""

    session: str
    member: int
    engine_id: str
    transfer_id: str
    params: bytes
    until: float


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other router opens its database meanwhile: SQLite does not wait for one that changes the journal's mode."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class SharedState:
    """Methods raise `Unavailable` if another router holds the database for too long; what was asked was not done then.
    Used by one event loop."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of the routers' group, which only their user can read; None: this router is alone."""
        self.folder, self.is_shared = folder, folder is not None
        path = ":memory:" if folder is None else str(folder / "routers.sqlite")
        self._database = sqlite3.connect(path, isolation_level=None, timeout=_LOCKED_MS / 1000)
        self._seen = -1
        self._pid = os.getpid()
        with nullcontext() if folder is None else _alone(folder):
            if self.is_shared:  # survives the death of any process; nothing here survives the machine's
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = OFF")
            self._database.executescript(_SCHEMA)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the body runs, no other router writes; all that it does is done, or nothing."""
        if self._database.in_transaction:
            yield
            return
        self._run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.rollback()
            raise
        self._run("COMMIT")

    def has_changed(self) -> bool:
        """Whether another router wrote something since this was last asked."""
        [[version]] = self._run("PRAGMA data_version")
        before, self._seen = self._seen, version
        return bool(version != before)

    def close(self) -> None:
        """Leave the other routers."""
        self.leave()
        self._database.close()

    def fact(self, name: str, default: str = "") -> str:
        """A text that all share; the first router that asks decides about the default."""
        self._run("INSERT OR IGNORE INTO facts VALUES (?, ?)", name, default)
        [[value]] = self._run("SELECT value FROM facts WHERE name = ?", name)
        return str(value)

    def known_fact(self, name: str) -> str:
        """A text that all share; empty if nobody has set it."""
        found = self._run("SELECT value FROM facts WHERE name = ?", name)
        return str(found[0][0]) if found else ""

    def set_fact(self, name: str, value: str) -> None:
        """Replace a text that all share."""
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)

    def secret(self) -> bytes:
        """A secret that only these routers know."""
        return self.fact("secret", token_hex(32)).encode()

    # Routers.

    def join(self, url: str) -> None:
        """Note that this process serves, and answers other routers at `url`."""
        started = psutil.Process(self._pid).create_time()
        self._run("INSERT OR REPLACE INTO routers VALUES (?, ?, ?)", self._pid, started, url)

    def leave(self) -> None:
        """Note that this process does not serve any more."""
        self._run("DELETE FROM routers WHERE pid = ?", self._pid)

    def others(self) -> dict[int, str]:
        """The URLs of the other routers that live, by process id; those that died are forgotten."""
        rows = self._run("SELECT pid, started, url FROM routers WHERE pid != ?", self._pid)
        dead = [pid for pid, started, _ in rows if not _lives(pid, started)]
        for pid in dead:
            self._run("DELETE FROM routers WHERE pid = ?", pid)
            self._run("DELETE FROM idle WHERE pid = ?", pid)
        return {pid: url for pid, _, url in rows if pid not in dead}

    def note_idle(self, member: int, idle: bool) -> None:
        """Note whether this router has nothing running at a member that it knows is draining."""
        where = (self._pid, member)
        known = bool(self._run("SELECT 1 FROM idle WHERE pid = ? AND member = ?", *where))
        if idle and not known:
            self._run("INSERT INTO idle VALUES (?, ?)", *where)
        elif known and not idle:
            self._run("DELETE FROM idle WHERE pid = ? AND member = ?", *where)

    def all_idle(self, member: int) -> bool:
        """Whether no other router has anything running at a member that is draining."""
        idle = {pid for (pid,) in self._run("SELECT pid FROM idle WHERE member = ?", member)}
        return self.others().keys() <= idle

    # Members.

    def members(self) -> list[MemberRow]:
        """All members, in the order in which they came."""
        found = self._run(
            "SELECT id, name, role, url, bootstrap_port, draining, drained, remove_when_drained, unit, declared"
            " FROM members ORDER BY id"
        )
        return [MemberRow._make([*row[:5], *map(bool, row[5:8]), row[8], bool(row[9])]) for row in found]

    def add_member(self, role: LegRole, url: str, bootstrap_port: int) -> int:
        """Add a member; returns its id. It has the name that it had when it was here before, or a new one. No other
        member has that name: a fleet, which names its members itself, may have taken it meanwhile."""
        with self.changing():
            former = self._run("DELETE FROM former_names WHERE role = ? AND url = ? RETURNING name", role, url)
            name = former[0][0] if former else ""
            while not name or self._is_taken(name):
                number = int(self.fact(f"next {role}", "0"))
                self.set_fact(f"next {role}", str(number + 1))
                name = f"{role}-{number}"
            [[found]] = self._run(
                "INSERT INTO members (name, role, url, bootstrap_port) VALUES (?, ?, ?, ?) RETURNING id",
                name, role, url, bootstrap_port,
            )  # fmt: skip
        return int(found)

    def declare_member(self, name: str, role: LegRole, url: str, bootstrap_port: int, unit: str) -> int:
        """Add an instance of a fleet, which has named it. One with that name, such as the same process in another role,
        is called after both from now on. Returns its id."""
        with self.changing():
            for before, its_role in self._run("SELECT id, role FROM members WHERE name = ?", name):
                other = f"{name}-{its_role}"
                while self._is_taken(other):
                    other += f"-{its_role}"
                self._run("UPDATE members SET name = ? WHERE id = ?", other, before)
            [[found]] = self._run(
                "INSERT INTO members (name, role, url, bootstrap_port, unit, declared) VALUES (?, ?, ?, ?, ?, 1)"
                " RETURNING id",
                name, role, url, bootstrap_port, unit,
            )  # fmt: skip
        return int(found)

    def _is_taken(self, name: str) -> bool:
        return bool(self._run("SELECT 1 FROM members WHERE name = ?", name))

    def drain_member(self, member: int, *, remove_when_drained: bool = False) -> None:
        """Drain a member: it gets no new requests."""
        self._run(
            "UPDATE members SET draining = 1, remove_when_drained = remove_when_drained OR ? WHERE id = ?",
            remove_when_drained, member,
        )  # fmt: skip

    def set_drained(self, member: int, drained: bool) -> None:
        """Note whether nothing is left of its requests."""
        self._run("UPDATE members SET drained = ? WHERE id = ?", drained, member)

    def remove_member(self, member: int) -> None:
        """Remove a member that is gone; if it comes back, metrics go on under its name."""
        with self.changing():
            self._run(
                "INSERT OR REPLACE INTO former_names SELECT role, url, name FROM members WHERE id = ? AND NOT declared",
                member,
            )
            self._run(
                "DELETE FROM former_names WHERE rowid IN"
                " (SELECT rowid FROM former_names ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                _MAX_FORMER_NAMES,
            )
            self._run("DELETE FROM members WHERE id = ?", member)
            self._run("DELETE FROM idle WHERE member = ?", member)

    # Leases.

    def lease(self, url: str) -> LeaseRow | None:
        """The lease of the process that registered this URL."""
        found = self._run("SELECT process, until FROM leases WHERE url = ?", url)
        return LeaseRow(*found[0]) if found else None

    def num_leases(self) -> int:
        """How many URLs are registered."""
        [[number]] = self._run("SELECT count(*) FROM leases")
        return int(number)

    def set_lease(self, url: str, process: str, until: float) -> None:
        """Note that a process has registered, or has renewed its lease."""
        self._run("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", url, process, until)

    def end_lease(self, url: str) -> None:
        """End the lease of a process that is gone."""
        self._run("DELETE FROM leases WHERE url = ?", url)

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by a time in which nobody could renew them."""
        self._run("UPDATE leases SET until = until + ?", seconds)

    def end_leases(self, now: float) -> list[str]:
        """End the leases that are over; returns their URLs."""
        if not self._run("SELECT 1 FROM leases WHERE until <= ? LIMIT 1", now):
            return []
        return [url for (url,) in self._run("DELETE FROM leases WHERE until <= ? RETURNING url", now)]

    # Tickets.

    def take_ticket(self, session: str) -> TicketRow | None:
        """Remove and return a conversation's ticket: one router gets it."""
        return _ticket(self._run("DELETE FROM tickets WHERE session = ? RETURNING *", session))

    def keep_ticket(self, ticket: TicketRow, most: int) -> list[TicketRow]:
        """Returns those that had to go for it: the one before of its conversation, and the oldest beyond `most`."""
        with self.changing():
            gone = self._run("DELETE FROM tickets WHERE session = ? RETURNING *", ticket.session)
            self._run("INSERT INTO tickets VALUES (?, ?, ?, ?, ?, ?)", *ticket)
            [[number]] = self._run("SELECT count(*) FROM tickets")
            if number > most:
                oldest = "SELECT session FROM tickets ORDER BY rowid LIMIT ?"
                gone += self._run(f"DELETE FROM tickets WHERE session IN ({oldest}) RETURNING *", number - most)
        return [TicketRow(*row) for row in gone]

    def has_ticket(self, session: str) -> bool:
        """Whether a ticket is kept for a conversation."""
        return bool(self._run("SELECT 1 FROM tickets WHERE session = ?", session))

    def has_tickets_of(self, member: int) -> bool:
        """Whether an instance keeps something for a next turn."""
        return bool(self._run("SELECT 1 FROM tickets WHERE member = ? LIMIT 1", member))

    def tickets(self) -> list[TicketRow]:
        """All tickets, the oldest first."""
        return [TicketRow(*row) for row in self._run("SELECT * FROM tickets ORDER BY rowid")]

    # Signed requests.

    def use(self, nonce: str, at_ns: int, oldest_ns: int) -> bool:
        """Whether a signed request is new to all routers, which remember it from now on; as `core.keys.ReplayGuard`."""
        self._run("DELETE FROM used WHERE at_ns < ?", oldest_ns)
        [[number]] = self._run("SELECT count(*) FROM used")
        if number >= _MAX_USED:
            return False
        return bool(self._run("INSERT OR IGNORE INTO used VALUES (?, ?) RETURNING 1", nonce, at_ns))

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the database that the routers share cannot be reached: {error}; try again") from error


def _ticket(rows: Iterable[Any]) -> TicketRow | None:
    return next((TicketRow(*row) for row in rows), None)


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
