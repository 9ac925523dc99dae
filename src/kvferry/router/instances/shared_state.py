"""State that the routers of a port share: the instances, their leases, the tickets for next turns, and the routers.

One SQLite database: a file in the folder of the routers' group, or in memory for a single router. There is no leader,
and routers do not wait for each other: each router writes its own changes, and reads the changes of others a few times
a second. Rows outlive the router that wrote them. Owns the connection; knows instances only as rows.
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
    """An instance. `id` is never reused; `remove_when_drained`: it is removed once it is drained; `unit`: it hands off
    within this unit only; `declared`: a fleet's controller manages it."""

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
    """The ticket for the KV that a decode instance (`member`) keeps for a conversation's next turn; `params` is
    JSON."""

    session: str
    member: int
    engine_id: str
    transfer_id: str
    params: bytes
    until: float


@contextmanager
def _open_lock(folder: Path) -> Iterator[None]:
    """Prevent other routers from opening the database: SQLite does not wait while the mode of the journal is
    changed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class SharedState:
    """The database. Methods raise `Unavailable` if another router locks it for too long. Nothing is changed then. Used
    by one event loop."""

    max_used = 2**16
    """Maximum number of signed requests that are remembered, of the last half minute."""
    max_former_names = 4096
    max_lock_wait_ms = 500
    """Maximum milliseconds to wait for the transaction of another router. A transaction takes microseconds unless that
    router was stopped."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: the folder of the group of routers, which only their user can read; None: a single router."""
        self.folder, self.is_shared = folder, folder is not None
        path = ":memory:" if folder is None else str(folder / "routers.sqlite")
        self._database = sqlite3.connect(path, isolation_level=None, timeout=self.max_lock_wait_ms / 1000)
        self._data_version = -1
        self._pid = os.getpid()
        with nullcontext() if folder is None else _open_lock(folder):
            if self.is_shared:  # survives the end of any process; need not survive the end of the machine
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = OFF")
            self._database.executescript(_SCHEMA)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run the body as a transaction: no other router writes at the same time, and either all changes are applied or
        none."""
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
        """True if another router has written since the last call."""
        [[version]] = self._run("PRAGMA data_version")
        before, self._data_version = self._data_version, version
        return bool(version != before)

    def close(self) -> None:
        """Leave the other routers."""
        self.leave()
        self._database.close()

    def fact(self, name: str, default: str = "") -> str:
        """Return a shared text; the first router that calls this sets the default."""
        self._run("INSERT OR IGNORE INTO facts VALUES (?, ?)", name, default)
        [[value]] = self._run("SELECT value FROM facts WHERE name = ?", name)
        return str(value)

    def get_fact(self, name: str) -> str:
        """Return a shared text; empty if it was not set."""
        rows = self._run("SELECT value FROM facts WHERE name = ?", name)
        return str(rows[0][0]) if rows else ""

    def set_fact(self, name: str, value: str) -> None:
        """Replace a shared text."""
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)

    def secret(self) -> bytes:
        """A secret that only these routers know."""
        return self.fact("secret", token_hex(32)).encode()

    # Routers.

    def join(self, url: str) -> None:
        """Record that this process serves, and answers other routers at `url`."""
        started = psutil.Process(self._pid).create_time()
        self._run("INSERT OR REPLACE INTO routers VALUES (?, ?, ?)", self._pid, started, url)

    def leave(self) -> None:
        """Record that this process no longer serves."""
        self._run("DELETE FROM routers WHERE pid = ?", self._pid)

    def siblings(self) -> dict[int, str]:
        """URLs of the other routers that are alive, by process id; dead routers are removed."""
        rows = self._run("SELECT pid, started, url FROM routers WHERE pid != ?", self._pid)
        dead = [pid for pid, started, _ in rows if not _is_alive(pid, started)]
        for pid in dead:
            self._run("DELETE FROM routers WHERE pid = ?", pid)
            self._run("DELETE FROM idle WHERE pid = ?", pid)
        return {pid: url for pid, _, url in rows if pid not in dead}

    def note_idle(self, member: int, idle: bool) -> None:
        """Record whether this router has no running request at a draining member."""
        key = (self._pid, member)
        was_idle = bool(self._run("SELECT 1 FROM idle WHERE pid = ? AND member = ?", *key))
        if idle and not was_idle:
            self._run("INSERT INTO idle VALUES (?, ?)", *key)
        elif was_idle and not idle:
            self._run("DELETE FROM idle WHERE pid = ? AND member = ?", *key)

    def all_idle(self, member: int) -> bool:
        """True if no other router has a running request at a draining member."""
        idle = {pid for (pid,) in self._run("SELECT pid FROM idle WHERE member = ?", member)}
        return self.siblings().keys() <= idle

    # Members.

    def members(self) -> list[MemberRow]:
        """All members, in the order in which they were added."""
        rows = self._run(
            "SELECT id, name, role, url, bootstrap_port, draining, drained, remove_when_drained, unit, declared"
            " FROM members ORDER BY id"
        )
        return [MemberRow._make([*row[:5], *map(bool, row[5:8]), row[8], bool(row[9])]) for row in rows]

    def add_member(self, role: LegRole, url: str, bootstrap_port: int) -> int:
        """Add a member; return its id. It gets its former name, if it had one and a fleet's member has not taken it
        meanwhile, or a new one."""
        with self.changing():
            former = self._run("DELETE FROM former_names WHERE role = ? AND url = ? RETURNING name", role, url)
            name = former[0][0] if former else ""
            while not name or self._is_taken(name):
                number = int(self.fact(f"next {role}", "0"))
                self.set_fact(f"next {role}", str(number + 1))
                name = f"{role}-{number}"
            [[member_id]] = self._run(
                "INSERT INTO members (name, role, url, bootstrap_port) VALUES (?, ?, ?, ?) RETURNING id",
                name, role, url, bootstrap_port,
            )  # fmt: skip
        return int(member_id)

    def declare_member(self, name: str, role: LegRole, url: str, bootstrap_port: int, unit: str) -> int:
        """Add an instance of a fleet under the fleet's name for it; return its id. Another instance with that name,
        such as the same process in another role, is renamed to name and role."""
        with self.changing():
            for same_named, role_of_same_named in self._run("SELECT id, role FROM members WHERE name = ?", name):
                new_name = f"{name}-{role_of_same_named}"
                while self._is_taken(new_name):
                    new_name += f"-{role_of_same_named}"
                self._run("UPDATE members SET name = ? WHERE id = ?", new_name, same_named)
            [[member_id]] = self._run(
                "INSERT INTO members (name, role, url, bootstrap_port, unit, declared) VALUES (?, ?, ?, ?, ?, 1)"
                " RETURNING id",
                name, role, url, bootstrap_port, unit,
            )  # fmt: skip
        return int(member_id)

    def _is_taken(self, name: str) -> bool:
        return bool(self._run("SELECT 1 FROM members WHERE name = ?", name))

    def drain_member(self, member: int, *, remove_when_drained: bool = False) -> None:
        """Drain a member: it gets no new requests."""
        self._run(
            "UPDATE members SET draining = 1, remove_when_drained = remove_when_drained OR ? WHERE id = ?",
            remove_when_drained, member,
        )  # fmt: skip

    def set_drained(self, member: int, drained: bool) -> None:
        """Record whether all requests of a draining member have ended."""
        self._run("UPDATE members SET drained = ? WHERE id = ?", drained, member)

    def remove_member(self, member: int) -> None:
        """Remove a member that is gone; its name is kept for its return, so that its metrics continue."""
        with self.changing():
            self._run(
                "INSERT OR REPLACE INTO former_names SELECT role, url, name FROM members WHERE id = ? AND NOT declared",
                member,
            )
            self._run(
                "DELETE FROM former_names WHERE rowid IN"
                " (SELECT rowid FROM former_names ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                self.max_former_names,
            )
            self._run("DELETE FROM members WHERE id = ?", member)
            self._run("DELETE FROM idle WHERE member = ?", member)

    # Leases.

    def lease(self, url: str) -> LeaseRow | None:
        """The lease of the process that registered this URL."""
        rows = self._run("SELECT process, until FROM leases WHERE url = ?", url)
        return LeaseRow(*rows[0]) if rows else None

    def num_leases(self) -> int:
        """Number of registered URLs."""
        [[number]] = self._run("SELECT count(*) FROM leases")
        return int(number)

    def set_lease(self, url: str, process: str, until: float) -> None:
        """Set the lease of a process that has registered, or has renewed its lease."""
        self._run("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", url, process, until)

    def end_lease(self, url: str) -> None:
        """End the lease of a process that is gone."""
        self._run("DELETE FROM leases WHERE url = ?", url)

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by a time in which they could not be renewed."""
        self._run("UPDATE leases SET until = until + ?", seconds)

    def end_leases(self, now: float) -> list[str]:
        """Remove expired leases; return their URLs."""
        if not self._run("SELECT 1 FROM leases WHERE until <= ? LIMIT 1", now):
            return []
        return [url for (url,) in self._run("DELETE FROM leases WHERE until <= ? RETURNING url", now)]

    # Tickets.

    def take_ticket(self, session: str) -> TicketRow | None:
        """Remove and return a conversation's ticket; only one router gets it."""
        return _ticket(self._run("DELETE FROM tickets WHERE session = ? RETURNING *", session))

    def store_ticket(self, ticket: TicketRow, max_tickets: int) -> list[TicketRow]:
        """Store a ticket; return the removed ones: its conversation's former ticket, and the oldest beyond
        `max_tickets`."""
        with self.changing():
            removed = self._run("DELETE FROM tickets WHERE session = ? RETURNING *", ticket.session)
            self._run("INSERT INTO tickets VALUES (?, ?, ?, ?, ?, ?)", *ticket)
            [[number]] = self._run("SELECT count(*) FROM tickets")
            if number > max_tickets:
                oldest = "SELECT session FROM tickets ORDER BY rowid LIMIT ?"
                removed += self._run(
                    f"DELETE FROM tickets WHERE session IN ({oldest}) RETURNING *", number - max_tickets
                )
        return [TicketRow(*row) for row in removed]

    def has_ticket(self, session: str) -> bool:
        """True if a conversation has a ticket."""
        return bool(self._run("SELECT 1 FROM tickets WHERE session = ?", session))

    def has_tickets_of(self, member: int) -> bool:
        """True if an instance keeps KV for a next turn."""
        return bool(self._run("SELECT 1 FROM tickets WHERE member = ? LIMIT 1", member))

    def tickets(self) -> list[TicketRow]:
        """All tickets, the oldest first."""
        return [TicketRow(*row) for row in self._run("SELECT * FROM tickets ORDER BY rowid")]

    # Signed requests.

    def use(self, nonce: str, at_ns: int, oldest_ns: int) -> bool:
        """Return True if a signed request is new to all routers, and remember it; as `core.keys.ReplayGuard`."""
        self._run("DELETE FROM used WHERE at_ns < ?", oldest_ns)
        [[number]] = self._run("SELECT count(*) FROM used")
        if number >= self.max_used:
            return False
        return bool(self._run("INSERT OR IGNORE INTO used VALUES (?, ?) RETURNING 1", nonce, at_ns))

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the database that the routers share cannot be reached: {error}; try again") from error


def _ticket(rows: Iterable[Any]) -> TicketRow | None:
    return next((TicketRow(*row) for row in rows), None)


def _is_alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
