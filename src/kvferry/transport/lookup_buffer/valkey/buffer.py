"""The lookup buffer over a key-value server: the producer puts blocks there and is done, the consumer takes them there.

Neither needs to reach the other, and the producer's blocks are free as soon as they are copied. It costs a copy into
the server and one out of it. Everything on the server has a time to live, so that nothing stays whoever dies.

`kv_buffer_size` bounds what the server keeps of ours: beyond it blocks wait in the KV cache, and prefills with them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.transport.connection import limited_to
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, Source, Taken, Want
from kvferry.transport.lookup_buffer.entries import EntryTable
from kvferry.transport.lookup_buffer.valkey.fetch import RENEWALS_PER_LEASE, Fetch
from kvferry.transport.lookup_buffer.valkey.records import Over, encode_record, place_of
from kvferry.transport.lookup_buffer.valkey.server import Server
from kvferry.transport.lookup_buffer.valkey.uploads import REMEMBER_S, Uploads
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import TransportOptions
from kvferry.transport.tasks import call_contained, contained, run_together
from kvferry.transport.tls import channel_tls

TICK_S = 0.25
TIDY_S = 5.0


class ValkeyLookupBuffer(LookupBuffer):
    """Both ends, for one instance. `url`: `valkey://[[user]:password@]host:port/database`, `unix://path`, …

    A key ends for its producer as "stored", once the server has all of it. A `source` is not looked at.
    """

    needs_address = False

    def __init__(self, memory: BlockMemory, url: str, token: str, table: EntryTable) -> None:
        if memory.device != "cpu":
            raise ConfigError(
                f"lookup_buffer valkey moves KV in host memory only, and this engine's is on {memory.device};"
                " run it with --device cpu"
            )
        super().__init__(table)
        self._memory, self._server, self._token = memory, Server(url), token
        self._uploads = Uploads(self.table, memory, self._server, token)
        self.table.on_key = self._uploads.add
        self._loop: asyncio.AbstractEventLoop | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    @classmethod
    def build(cls, context: LookupBufferContext) -> ValkeyLookupBuffer:
        """At `valkey_url`."""
        _require_no_tls(context.settings)
        return cls(context.memory, _url_of(context.settings), context.token, context.table)

    @classmethod
    def check_settings(cls, settings: TransportOptions) -> None:
        """No server is named, or its client's package is not installed."""
        _url_of(settings)
        _require_no_tls(settings)
        require_library("lookup_buffer valkey", "valkey", "valkey", ["valkey"])

    # Producer: the rest is the entry table's.

    def end(self, key: str) -> bool:
        """End a key as released, also when the server has it already, or before it begins."""
        if super().end(key):
            return True
        stored = self._uploads.end_stored(key)
        if stored and self._loop is not None:
            self._loop.call_soon_threadsafe(self._release_stored, key)
        return stored

    def _release_stored(self, key: str) -> None:
        task = asyncio.ensure_future(self._uploads.release(key))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its time to live ends it, then

    # Consumer.

    async def _take(self, want: Want) -> Taken:
        return await Fetch(self._server, self._token, self._memory, want, self._place(want.key)).run()

    async def keep(self, key: str, source: Source) -> None:
        """Renew the lease on the server now and then."""
        lease_s = self.table.bounds.lease_s
        while True:
            if await self._server.renew(self._place(key), lease_s) not in ("", "open", "sealed"):
                return
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the server, and thereby the producer, that nobody will come."""
        place = self._place(key)
        async with limited_to(deadline, f"release of {key!r}"):
            record = encode_record(Over("released"), place, self._token)
            await self._server.end(place, "released", record, REMEMBER_S)

    def _place(self, key: str) -> str:
        return place_of(key, self._memory.layout.tp_rank)

    # Both.

    async def run(self) -> None:
        """Copy to the server and let leases end, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            await run_together(self._uploads.run(), self._expire(), self._tidy())
        finally:
            self._loop = None
            for task in self._releasing:
                task.cancel()
            with suppress(KvferryError):
                await self._server.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self.table.bounds.lease_s / 50))
            call_contained(self.table.expire, "ending leases", lambda error: None)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            await contained(self._uploads.forget_taken, "tidying the server")

    def address(self) -> dict[str, Any]:
        """The server's, for routers: a consumer is configured with it. On a Unix socket there is none."""
        return {"host": self._server.host, "port": self._server.port}

    def statistics(self) -> dict[str, float]:
        """Of the table, of what was copied to the server, and of what was taken from it."""
        return super().statistics() | self._uploads.statistics()


def _url_of(settings: TransportOptions) -> str:
    """`kv_port` cannot name the server: each rank and each instance of a fleet has its own."""
    if not settings.valkey_url:
        raise ConfigError(
            "lookup_buffer valkey needs the server: set kv_connector_extra_config.valkey_url, as in"
            ' "valkey://127.0.0.1:6379" or "unix:///run/valkey.sock"'
        )
    return settings.valkey_url


def _require_no_tls(settings: TransportOptions) -> None:
    if channel_tls(settings) is not None:
        raise ConfigError(
            "kv_connector_extra_config.tls_cert: with lookup_buffer valkey instances do not speak to each other; the"
            ' TLS of the server is asked for by its URL, as in "valkeys://host:6379"'
        )
