"""What a server of LMCache's understands (`lmcache_server`, `lm://` in LMCache's own settings): put, get, sign of life.

    request    command, length, format, dtype, location, shape[4]: i32, little-endian; key, 150 bytes, blanks behind it
    answer     code, length, format, dtype, shape[4], location: i32; then `length` bytes

Owns the connections. A put is not answered, so a sign of life is asked for after it: requests of one connection are
served in order. The server checks nothing and authenticates nobody; lengths that it states are bounded here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvferry.core.errors import StoreError

_REQUEST, _ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")
_PUT, _GET, _HEALTH, _SUCCESS = 1, 2, 5, 200
_BINARY, _UINT8 = 4, 6
"""LMCache's numbers of a format and a dtype that mean bytes."""
CONNECT_S = 3.0
COMMAND_S = 30.0
"""The longest that one call may take; a tier's `deadline_s` is shorter."""
WINDOW = 64
"""Gets under way on one connection: more, and both ends could wait for the other to read."""
MAX_CONNECTIONS = 4
MAX_BYTES = 2**31 - 1
"""Of one value: its length is an i32."""
SIGN = "kvferry@1@0@0@uint8"
"""A key that can be read, for requests that are of none."""


class DamagedValue(Exception):
    """The server cannot give what it has under this key: whoever put it broke off. Does not leave the store."""


class LMCacheClient:
    """Used on one event loop. Every method may raise `StoreError`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)

    async def close(self) -> None:
        """End every connection."""
        free, self._free = self._free, []
        for _, writer in free:
            writer.close()

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Store these, in order, in place of what is there. When this returns, the server has all of them."""
        if not values:
            return
        async with self._connection() as (reader, writer):
            for key, value in values:
                writer.write(_request(_PUT, key, len(value)))
                writer.write(value)
                await writer.drain()
            writer.write(_request(_HEALTH, SIGN, 0))
            code, _ = await _answer(reader)
            if code != _SUCCESS:
                raise StoreError(f"{self._name}: it is not well (code {code})")

    async def get(self, keys: Sequence[str], max_bytes: int) -> list[bytes | DamagedValue | None]:
        """The values, each of at most `max_bytes`; None: there is none."""
        found: list[bytes | DamagedValue | None] = []
        while len(found) < len(keys):
            async with self._connection() as (reader, writer):
                try:
                    while len(found) < len(keys):
                        await self._get(reader, writer, keys[len(found) :][:WINDOW], max_bytes, found)
                except DamagedValue as damage:  # and with it the connection has ended
                    found.append(damage)
                    writer.close()
        return found

    async def _get(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: Sequence[str],
        max_bytes: int,
        found: list[bytes | DamagedValue | None],
    ) -> None:
        for key in keys:
            writer.write(_request(_GET, key, 0))
        await writer.drain()
        for _ in keys:
            _acknowledge_at_once(writer)
            code, length = await _answer(reader)
            if code != _SUCCESS:
                found.append(None)
                continue
            if length > max_bytes:
                raise StoreError(f"{self._name}: it announces {length} bytes where {max_bytes} are the most")
            found.append(await _value(reader, length))

    # Connections.

    @property
    def _name(self) -> str:
        return f"the LMCache server at {self._host}:{self._port}"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One of them, to oneself. After an error, or when cancelled, it is of no more use."""
        try:
            async with asyncio.timeout(COMMAND_S), self._turns:
                reader, writer = self._free.pop() if self._free else await self._connect()
                try:
                    yield reader, writer
                except BaseException:
                    writer.transport.abort()
                    await self.close()  # the others are of a server that is perhaps not there any more
                    raise
                if not writer.is_closing():
                    self._free.append((reader, writer))
        except TimeoutError as error:
            raise StoreError(f"{self._name} does not answer") from error
        except asyncio.IncompleteReadError as error:
            raise StoreError(f"{self._name} closed the connection") from error
        except OSError as error:
            raise StoreError(f"cannot reach {self._name}: {error.strerror or error}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(self._host, self._port)


def _acknowledge_at_once(writer: asyncio.StreamWriter) -> None:
    """The server sends each answer in two pieces, and the second when the first is acknowledged: by itself the kernel
    takes its time, 40 ms, and goes back to that after a while."""
    if hasattr(socket, "TCP_QUICKACK"):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _request(command: int, key: str, length: int) -> bytes:
    return _REQUEST.pack(command, length, _BINARY, _UINT8, 0, length, 0, 0, 0, key.encode().ljust(150))


async def _answer(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Code and length."""
    code, length, *_ = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    if length < 0:
        raise StoreError(f"an LMCache server announces {length} bytes")
    return code, length


async def _value(reader: asyncio.StreamReader, length: int) -> bytes:
    """Raises `DamagedValue` where the connection ends just here: the server raised, since it has only the length."""
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise DamagedValue from error
        raise
    except ConnectionResetError as error:
        raise DamagedValue from error
