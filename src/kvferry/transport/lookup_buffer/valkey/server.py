"""The key-value server, Valkey or Redis: what is done there in one step each, and its errors in our words.

The only place that imports the `valkey` package. Every call ends within `COMMAND_S`, or says `TransferTimeout`; the
server's own expiry removes whatever nobody comes back to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvferry.core.errors import ConfigError, MissingDependency, PeerLost, TransferError, TransferTimeout
from kvferry.transport.lookup_buffer.valkey.scripts import APPEND, BEGIN, END, RENEW, TAKE

try:
    import valkey.asyncio as client
    from valkey import exceptions
    from valkey.asyncio.retry import Retry
    from valkey.backoff import NoBackoff
except ModuleNotFoundError as error:
    raise MissingDependency("lookup_buffer valkey", "valkey", "valkey") from error

DEFAULT_PORT = 6379
COMMAND_S = 5.0
CONNECT_S = 3.0
BLOCK_S = 1.0
"""How long the server holds back an answer for want of news: no work for anybody meanwhile."""
MAX_CONNECTIONS = 1024


class ServerFull(TransferError):
    """The server has no memory for more (`maxmemory`)."""


class Server:
    """One server, reached over as many connections as there are calls at a time; `close` it."""

    def __init__(self, url: str) -> None:
        """Connects when first used. Raises `ConfigError` when the address cannot be one."""
        try:
            pool = client.ConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                socket_timeout=None,  # ours instead: within its own, Python 3.11 can lose a cancellation
                socket_connect_timeout=CONNECT_S,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise ConfigError(f"kv_connector_extra_config.valkey_url: {error}") from error
        self.where = _without_password(url)
        self.host = str(pool.connection_kwargs.get("host", "" if "path" in pool.connection_kwargs else "localhost"))
        self.port = int(pool.connection_kwargs.get("port", DEFAULT_PORT if self.host else 0))
        """Its address, if it has one: a Unix socket has none."""
        self._client = client.Valkey(connection_pool=pool)
        self._begin = self._client.register_script(BEGIN)
        self._append = self._client.register_script(APPEND)
        self._take = self._client.register_script(TAKE)
        self._end = self._client.register_script(END)
        self._renew = self._client.register_script(RENEW)

    # Producer. Each returns the state that it found or left: "open", or why the hand-off is over.

    async def begin(self, place: str, generation: int, record: bytes, ttl_s: float) -> str:
        """Begin a generation, unless its consumer has left already."""
        return await self._state(self._begin(keys=_keys(place), args=[generation, _ms(ttl_s), record]))

    async def append(
        self, place: str, generation: int, record: bytes, ttl_s: float, fields: Mapping[str, bytes], state: str = "open"
    ) -> str:
        """Add pieces and their record to an open generation, all or nothing; `state` "sealed" completes it."""
        async with self._translated(), self._client.pipeline(transaction=True) as pipeline:
            if fields:
                pipeline.hset(place, mapping=dict(fields))
            await self._append(
                keys=_keys(place), args=[generation, _ms(ttl_s), record, state, *fields], client=pipeline
            )
            answers = await pipeline.execute()
        return _text(answers[-1])

    async def states(self, places: Sequence[str]) -> list[str | None]:
        """Of each hand-off; None when there is nothing any more."""
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for place in places:
                pipeline.hget(place, "state")
            return [None if state is None else _text(state) for state in await pipeline.execute()]

    # Consumer.

    async def news(self, place: str, after: str, block_s: float) -> list[tuple[str, bytes]]:
        """Records after this one ("0" for the first), with their names; waits up to `block_s` for one."""
        async with self._translated():
            found = await self._client.xread({f"{place}:news": after}, block=_ms(min(block_s, BLOCK_S)))
        return [(_text(name), fields.get(b"r", b"")) for _, entries in found for name, fields in entries]

    async def pieces(self, place: str, fields: Sequence[str]) -> tuple[str, str, list[bytes | None]]:
        """The generation and state that are there, "" for none, and the pieces; None where there is none."""
        async with self._translated():
            found = await self._client.hmget(place, ["generation", "state", *fields])  # type: ignore[misc]
        return _text(found[0] or b""), _text(found[1] or b""), found[2:]

    async def take(self, place: str, generation: int, record: bytes, ttl_s: float) -> bool:
        """The fence: whether this generation is sealed and there. If so it is ours, and nobody else's."""
        return await self._state(self._take(keys=_keys(place), args=[generation, _ms(ttl_s), record])) == "1"

    async def renew(self, place: str, ttl_s: float) -> str:
        """Begin a sealed hand-off's lease anew; returns its state, "" for none."""
        return await self._state(self._renew(keys=_keys(place), args=[_ms(ttl_s)]))

    # Both.

    async def end(self, place: str, reason: str, record: bytes, ttl_s: float, *, generation: int | None = None) -> None:
        """End a hand-off, or one that has not begun; what is kept of it is its reason. With a `generation`, only
        when it is this one. One that is over already stays as it is."""
        args: list[str | int | bytes] = [reason, _ms(ttl_s), record, "" if generation is None else generation]
        await self._state(self._end(keys=_keys(place), args=args))

    async def close(self) -> None:
        """End every connection."""
        async with self._translated():
            await self._client.aclose(close_connection_pool=True)

    async def _state(self, call: Awaitable[Any]) -> str:
        async with self._translated():
            return _text(await call)

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(COMMAND_S):
                yield
        except (TimeoutError, exceptions.TimeoutError) as error:
            raise TransferTimeout(f"the server at {self.where} does not answer") from error
        except exceptions.AuthenticationError as error:
            raise ConfigError(f"the server at {self.where} wants another password: {error}") from error
        except (exceptions.ConnectionError, OSError) as error:
            raise PeerLost(f"cannot reach the server at {self.where}: {error}") from error
        except exceptions.ValkeyError as error:
            if _is_full(error):
                raise ServerFull(f"the server at {self.where} is full; raise its maxmemory") from error
            raise TransferError(f"the server at {self.where}: {error}") from error


def _is_full(error: Exception) -> bool:
    return isinstance(error, exceptions.OutOfMemoryError) or "OOM" in str(error) or "maxmemory" in str(error)


def _keys(place: str) -> list[str]:
    return [place, f"{place}:news"]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
