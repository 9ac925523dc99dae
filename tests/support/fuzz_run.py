"""Fires the requests of `fuzz_grammar` at servers, many at once, and judges each answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from support.fuzz_grammar import Shot, make_shot

MOST_FAILURES = 20


class Wrong(Exception):
    """An answer that no server should give."""


@dataclass
class Tally:
    """What came of a run: statuses by kind of request, and what was wrong."""

    statuses: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, kind: str, *statuses: int) -> int:
        """How many requests of a kind were answered so."""
        return sum(self.statuses[kind, status] for status in statuses)


async def fire(targets: Sequence[str], *, seed: int, numbers: range, at_once: int, answer_s: float) -> Tally:
    """Send all, each to one of `targets` (host:port) in turn. Stops early after `MOST_FAILURES`."""
    tally, left = Tally(), iter(numbers)
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(_gunner(targets, seed, left, tally, answer_s))
    return tally


async def _gunner(targets: Sequence[str], seed: int, left: Iterator[int], tally: Tally, answer_s: float) -> None:
    connections = [_Connection(target) for target in targets]
    for number in left:
        shot = make_shot(seed, number)
        try:
            async with asyncio.timeout(answer_s):
                status = await connections[number % len(connections)].ask(shot)
            tally.statuses[shot.kind, status] += 1
        except (Wrong, TimeoutError, OSError, ValueError) as error:
            sent = shot.encoded()
            what = sent[:600] + (b"..." if len(sent) > 600 else b"")
            tally.failures.append(f"request {number} of seed {seed} ({shot.kind}): {error!r}\n    {what!r}")
            connections[number % len(connections)].close()
        if len(tally.failures) >= MOST_FAILURES:
            break
    for connection in connections:
        connection.close()


class _Connection:
    """A connection that is opened when it is needed, and kept as long as the server keeps it."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, shot: Shot) -> int | None:
        """The status of the answer, once all of it was read and found right; None where none was waited for."""
        reused = self._streams is not None and not self._streams[0].at_eof()
        if shot.raw is not None or not reused:
            self.close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(shot.encoded())
        if shot.leaves:
            await asyncio.wait([asyncio.ensure_future(reader.read(64))], timeout=0.01)
            self.close(abort=True)
            return None
        if shot.raw is not None:
            writer.write_eof()
        try:
            return await self._answer(reader, shot)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.close()
            if shot.raw is not None:
                return None  # cut off: an answer enough to what is no request
            raise Wrong(f"no whole answer: {error!r}") from error

    async def _answer(self, reader: asyncio.StreamReader, shot: Shot) -> int:
        status, headers = await _head(reader)
        while status == 100:
            status, headers = await _head(reader)
        body = b"" if shot.method == "HEAD" or status == 204 else await _read(reader, headers)
        if shot.raw is not None or headers.get("connection") == "close":
            self.close()
        _judge(shot, status, headers, body)
        return status

    def close(self, abort: bool = False) -> None:
        """Give the connection up."""
        if self._streams is not None:
            (self._streams[1].transport.abort if abort else self._streams[1].close)()
            self._streams = None


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head[:-4].split("\r\n")
    pairs = (one.split(":", 1) for one in lines)
    return int(line.split(" ")[1]), {name.lower(): value.strip() for name, value in pairs}


async def _read(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        length = headers.get("content-length")
        return await reader.read() if length is None else await reader.readexactly(int(length))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return bytes(body)


def _judge(shot: Shot, status: int, headers: dict[str, str], body: bytes) -> None:
    """Raise `Wrong` unless it is an answer that a client can use."""
    kind = headers.get("content-type", "").partition(";")[0]
    if status >= 500 and status not in (501, 503):
        raise Wrong(f"status {status}: {body[:500]!r}")
    if status == 400 and kind == "text/plain" and shot.kind in ("no HTTP", "odd headers", "other route"):
        return  # refused by what reads HTTP, below what knows of OpenAI
    if status >= 400:
        _require_envelope(body)
    elif shot.kind == "no HTTP":
        raise Wrong(f"status {status} for what is no request")
    elif kind == "text/event-stream":
        _require_events(body)
    elif kind == "application/json":
        json.loads(body)
    if shot.kind == "valid" and status not in (200, 429, 503):
        raise Wrong(f"status {status} for a valid request: {body[:500]!r}")
    if shot.kind == "malformed" and status == 200:
        json.loads(shot.body)  # a flipped bit within a text is no harm


def _require_envelope(body: bytes) -> None:
    error = json.loads(body)["error"]
    if not (isinstance(error["message"], str) and error["message"] and len(error["message"]) <= 2000 and error["type"]):
        raise Wrong(f"not OpenAI's envelope: {body[:500]!r}")


def _require_events(body: bytes) -> None:
    if not body.endswith(b"data: [DONE]\n\n"):
        raise Wrong(f"a stream without its end: {body[-500:]!r}")
    for event in body[:-2].split(b"\n\n")[:-1]:
        json.loads(event.removeprefix(b"data: "))
