"""The protocol of LMCache's server (`lmcache_server`; `lm://` in LMCache's own settings): put, get, health.

    request    command, length, format, dtype, location, shape[4]: i32, little-endian; key: 150 bytes, blanks at its end
    answer     code, length, format, dtype, shape[4], location: i32; then `length` bytes

Owns the connections. The server does not answer a put, so a health request follows it: the server handles the requests
of one connection in order. The server has no checksums and no authentication. The client limits the lengths that the
server may announce.
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
"""LMCache's numbers of the format and the dtype for plain bytes."""
WINDOW = 64
"""Maximum number of gets in flight on one connection: with more, both sides could wait for the other one to read."""
MAX_BYTES = 2**31 - 1
"""Maximum length of a value: it is an i32."""
PLACEHOLDER_KEY = "kvferry@1@0@0@uint8"
"""The key of requests that need none; the server parses it nevertheless."""


class DamagedValue(Exception):
    """The server has no complete value under this key, because the writer was interrupted. Handled within the store."""


class LMCacheClient:
    """Connections to one server. Used on one event loop. Every method may raise `StoreError`."""

    max_connections = 4
    command_s = 30.0
    """Maximum seconds for one call; a tier's `deadline_s` is shorter."""
    connect_s = 3.0

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._connection_limit = asyncio.Semaphore(self.max_connections)

    async def close(self) -> None:
        """Close the connections that are idle."""
        free, self._idle = self._idle, []
        for _, writer in free:
            writer.close()

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Store key and value pairs, in order. When this returns, the server has all of them."""
        if not values:
            return
        async with self._connection() as (reader, writer):
            for key, value in values:
                writer.write(_request(_PUT, key, len(value)))
                writer.write(value)
                await writer.drain()
            writer.write(_request(_HEALTH, PLACEHOLDER_KEY, 0))
            code, _ = await _answer(reader)
            if code != _SUCCESS:
                raise StoreError(f"{self._name} reports that it is not healthy (code {code})")

    async def get(self, keys: Sequence[str], max_bytes: int) -> list[bytes | DamagedValue | None]:
        """The values, one for each key, of at most `max_bytes` each. None: there is no value. A `DamagedValue` (as a
        value of the list, not raised): the server has only the value's length."""
        values: list[bytes | DamagedValue | None] = []
        while len(values) < len(keys):
            async with self._connection() as (reader, writer):
                try:
                    while len(values) < len(keys):
                        await self._get(reader, writer, keys[len(values) :][:WINDOW], max_bytes, values)
                except DamagedValue as damage:  # after which the server has closed the connection
                    values.append(damage)
                    writer.close()
        return values

    async def _get(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: Sequence[str],
        max_bytes: int,
        values: list[bytes | DamagedValue | None],
    ) -> None:
        for key in keys:
            writer.write(_request(_GET, key, 0))
        await writer.drain()
        for _ in keys:
            _enable_quick_ack(writer)
            code, length = await _answer(reader)
            if code != _SUCCESS:
                values.append(None)
                continue
            if length > max_bytes:
                raise StoreError(f"{self._name} announces a value of {length} bytes; at most {max_bytes} were expected")
            values.append(await _value(reader, length))

    # Connections.

    @property
    def _name(self) -> str:
        return f"the LMCache server at {self._host}:{self._port}"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One connection for the caller alone. After an error or a cancellation, it is closed, and so are all idle
        connections."""
        try:
            async with asyncio.timeout(self.command_s), self._connection_limit:
                reader, writer = self._idle.pop() if self._idle else await self._connect()
                try:
                    yield reader, writer
                except BaseException:
                    writer.transport.abort()
                    await self.close()  # the server may be gone, so the other connections may be broken too
                    raise
                if not writer.is_closing():
                    self._idle.append((reader, writer))
        except TimeoutError as error:
            raise StoreError(f"{self._name} does not answer") from error
        except asyncio.IncompleteReadError as error:
            raise StoreError(f"{self._name} closed the connection") from error
        except OSError as error:
            raise StoreError(f"cannot reach {self._name}: {error.strerror or error}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(self.connect_s):
            return await asyncio.open_connection(self._host, self._port)


def _enable_quick_ack(writer: asyncio.StreamWriter) -> None:
    """Acknowledge received bytes at once. The server sends an answer in two packets, the second only when the first is
    acknowledged, and the kernel delays acknowledgements by up to 40 ms. The kernel returns to this delay after a while,
    so call this before each answer."""
    if hasattr(socket, "TCP_QUICKACK"):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _request(command: int, key: str, length: int) -> bytes:
    return _REQUEST.pack(command, length, _BINARY, _UINT8, 0, length, 0, 0, 0, key.encode().ljust(150))


async def _answer(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Code and length of an answer."""
    code, length, *_ = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    if length < 0:
        raise StoreError(f"an LMCache server announces {length} bytes")
    return code, length


async def _value(reader: asyncio.StreamReader, length: int) -> bytes:
    """Raises `DamagedValue` if the connection ends before the first byte: the server then has only the value's
    length."""
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise DamagedValue from error
        raise
    except ConnectionResetError as error:
        raise DamagedValue from error
