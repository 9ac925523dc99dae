"""KV blocks on a Valkey or Redis server: `valkey://[[user]:password@]host:port/database`, or `unix:///path/to.socket`.

Owns the connections. The only place of the stores that imports the `valkey` package. A batch is one pipeline. A block
is one value, `kvferry:{<layout fingerprint>.<codec>}:<block hash>`, with a time to live of `ttl_s` unless pinned.

What bounds it: `max_bytes` (blocks used longest ago go, in one step on the server, whoever put them; all instances say
the same), or the server's own `maxmemory` (with `volatile-lru` it leaves pinned blocks alone).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, MissingDependency, StoreError
from kvferry.core.layout import KVLayout
from kvferry.store.base import MAX_NOTE_BYTES, Block, KVStore, Put, Read, StoreFull, StoreOptions
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop, Threads

try:
    import valkey.asyncio as client
    from valkey import exceptions
    from valkey.asyncio.retry import Retry
    from valkey.backoff import NoBackoff
except ModuleNotFoundError as error:
    raise MissingDependency("store valkey", "valkey", "valkey") from error

COMMAND_S = 30.0
"""The longest that a batch may take; a tier's `deadline_s` is shorter."""
CONNECT_S = 3.0
MAX_CONNECTIONS = 64
BATCH_BYTES = 64 * 2**20
DAY_S = 86400.0
MAX_SAID = 300
FULL_HINT = "; raise its maxmemory, or let it evict (maxmemory-policy volatile-lru)"

_KEPT = """
-- KEYS: index (by last use), sizes, pinned, total. ARGV: max bytes, prefix of blocks, now, then hash and size of each.
for at = 4, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', KEYS[2], ARGV[at]) or '0')
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[at])
  redis.call('INCRBY', KEYS[4], tonumber(ARGV[at + 1]) - before)
end
local gone, from = {}, 0
while tonumber(redis.call('GET', KEYS[4]) or '0') > tonumber(ARGV[1]) do
  local oldest = redis.call('ZRANGE', KEYS[1], from, from)[1]
  if not oldest then break end
  if redis.call('SISMEMBER', KEYS[3], oldest) == 1 then
    from = from + 1
  else
    redis.call('UNLINK', ARGV[2] .. oldest)
    redis.call('ZREM', KEYS[1], oldest)
    redis.call('DECRBY', KEYS[4], tonumber(redis.call('HGET', KEYS[2], oldest) or '0'))
    redis.call('HDEL', KEYS[2], oldest)
    gone[#gone + 1] = oldest
  end
end
return gone
"""

_GONE = """
-- KEYS as above. ARGV: hashes that are not there any more.
for at = 1, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[at])
  redis.call('SREM', KEYS[3], ARGV[at])
  local size = redis.call('HGET', KEYS[2], ARGV[at])
  if size then
    redis.call('DECRBY', KEYS[4], tonumber(size))
    redis.call('HDEL', KEYS[2], ARGV[at])
  end
end
return #ARGV
"""


class ValkeyOptions(StoreOptions, frozen=True, kw_only=True):
    """`password_file` keeps the password off command lines. `tls_*`: files, where the scheme says TLS."""

    max_bytes: int | None = None
    ttl_s: float = 7 * DAY_S
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class ValkeyStore(KVStore):
    """A store in a Valkey or Redis server, which other instances may share: one value for each block."""

    options_type = ValkeyOptions
    options: ValkeyOptions
    tls = False

    def __init__(self, location: str, options: ValkeyOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        self.where = location.rpartition("@")[2].removeprefix("//")
        self._pool = _pool(location, options, tls=self.tls)
        self._client: Any = client.Valkey(connection_pool=self._pool)
        place = f"kvferry:{{{layout.fingerprint()}.{options.codec}}}:"
        self._prefix = place.encode()
        self._keys = [f"{place}{name}" for name in ("index", "sizes", "pinned", "total")]
        self._threads = Threads(2, "kvferry-valkey-codec")
        self._kept = self._client.register_script(_KEPT)
        self._forget = self._client.register_script(_GONE)

    @classmethod
    def check(cls, location: str, options: Any) -> None:
        """A host, or the path of a socket."""
        _pool(location, options, tls=cls.tls)

    async def open(self) -> None:
        """Nothing: it connects when it is first used, and again whenever that is needed."""

    async def close(self) -> None:
        """End every connection, and the threads that encode and decode."""
        self._threads.close()
        async with self._translated():
            await self._client.aclose(close_connection_pool=True)

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """One pipeline of STRLEN."""
        sizes = await self._sizes(hashes)
        return sizes.index(0) if 0 in sizes else len(sizes)

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """One pipeline of GETRANGE for each `BATCH_BYTES`."""
        found: list[bool] = []
        for part in self._parts(reads):
            found += await self._get(part)
        return found

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """What is there already is not sent."""
        there = await self._sizes([block.block_hash for block in blocks])
        new = {block.block_hash: block for block, known in zip(blocks, there, strict=True) if not known}
        dropped: set[BlockHash] = set()
        with suppress(StoreFull):  # who put them may have ended before they were on the list of those to be evicted
            await self._make_room([(block.block_hash, size) for block, size in zip(blocks, there, strict=True) if size])
        for part in self._parts(list(new.values())):
            try:
                dropped |= await self._put(part)
            except StoreFull as error:
                self.warn_full(error)
                dropped |= {block.block_hash for block in part}
        outcomes = [
            Put.PRESENT if known else Put.DROPPED if block.block_hash in dropped else Put.STORED
            for block, known in zip(blocks, there, strict=True)
        ]
        self.count(present_blocks=outcomes.count(Put.PRESENT), stored_blocks=outcomes.count(Put.STORED))
        self.note_kept(block.block_hash for block, out in zip(blocks, outcomes, strict=True) if out is not Put.DROPPED)
        return outcomes

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Without a time to live, and on the list of those that stay."""
        return await self._set_pinned(hashes, True)

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """The other way."""
        return await self._set_pinned(hashes, False)

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """UNLINK."""
        if not hashes:
            return 0
        async with self._translated():
            count: int = await self._client.unlink(*map(self._key, hashes))
            await self._forget(keys=self._keys, args=[name.hex() for name in hashes])
        self.note_removed(hashes)
        return count

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """A value with a time to live."""
        if len(content) > MAX_NOTE_BYTES:
            raise StoreError(f"a note of {len(content)} bytes, and {MAX_NOTE_BYTES} is the most")
        async with self._translated():
            await self._client.set(_note_key(name), content, px=_ms(ttl_s))

    async def read_note(self, name: str) -> bytes | None:
        """At most as long as one may be."""
        async with self._translated():
            found: bytes = await self._client.getrange(_note_key(name), 0, MAX_NOTE_BYTES)
        return found or None

    async def remove_note(self, name: str) -> None:
        """UNLINK."""
        async with self._translated():
            await self._client.unlink(_note_key(name))

    # One batch.

    async def _sizes(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Of each record; 0: there is none."""
        if not hashes:
            return []
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for block_hash in hashes:
                pipeline.strlen(self._key(block_hash))
            return [found or 0 for found in _readable(await pipeline.execute(raise_on_error=False))]

    async def _get(self, reads: Sequence[Read]) -> list[bool]:
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for read in reads:
                # No more than a block can have: what lies there may be anybody's.
                pipeline.getrange(self._key(read.block_hash), 0, self.records.max_record_bytes)
            records = _readable(await pipeline.execute(raise_on_error=False))
        found = await self._threads.run(
            lambda stop: [
                not stop.requested and self._decode(read, record) for read, record in zip(reads, records, strict=True)
            ]
        )
        used = [read.block_hash for read, there in zip(reads, found, strict=True) if there]
        damaged = [
            read.block_hash
            for read, record, there in zip(reads, records, found, strict=True)
            if record != b"" and not there
        ]
        with suppress(StoreError):  # what was read was read, also where the server is full or gone since
            await self._used(damaged, used)
        return found

    async def _used(self, damaged: Sequence[BlockHash], used: Sequence[BlockHash]) -> None:
        if damaged:
            await self.delete(damaged)
        if used and self.options.max_bytes is not None:
            async with self._translated():
                await self._client.zadd(self._keys[0], {name.hex(): SYSTEM_CLOCK.wall() for name in used}, xx=True)

    def _decode(self, read: Read, record: bytes | None) -> bool:
        if record == b"":
            self.count(missing_blocks=1)
            self.note_removed([read.block_hash])
            return False
        try:
            if record is None:
                raise CorruptBlock("a value of another type")
            self.records.decode(memoryview(record), read.block_hash, read.into)
        except CorruptBlock:
            self.count(corrupt_blocks=1)
            return False
        self.count(loaded_blocks=1, read_bytes=len(record))
        return True

    async def _put(self, blocks: Sequence[Block]) -> set[BlockHash]:
        """Returns those for which there is no room. They are on the list of what to evict before they are there: who is
        killed in between leaves nothing that is never evicted."""
        records = await self._threads.run(lambda stop: [self._encode(block, stop) for block in blocks])
        names = [block.block_hash for block in blocks]
        try:
            gone = await self._make_room([(name, len(record)) for name, record in zip(names, records, strict=True)])
            kept = {name: record for name, record in zip(names, records, strict=True) if name not in gone}
            await self._set(kept)
        except StoreError:
            self.count(dropped_blocks=len(blocks))
            with suppress(StoreError):
                await self._forget_missing(names)
            raise
        self.count(written_bytes=sum(map(len, kept.values())), dropped_blocks=len(blocks) - len(kept))
        return set(names) - kept.keys()

    def _encode(self, block: Block, stop: Stop) -> bytes:
        return b"" if stop.requested else b"".join(self.records.encode(block.block_hash, block.layers))

    async def _set(self, records: dict[BlockHash, bytes]) -> None:
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for name, record in records.items():
                pipeline.set(self._key(name), record, px=_ms(self.options.ttl_s))
            await pipeline.execute()

    async def _forget_missing(self, hashes: Sequence[BlockHash]) -> None:
        sizes = await self._sizes(hashes)
        missing = [name.hex() for name, size in zip(hashes, sizes, strict=True) if not size]
        if missing and self.options.max_bytes is not None:
            async with self._translated():
                await self._forget(keys=self._keys, args=missing)

    async def _make_room(self, sizes: Sequence[tuple[BlockHash, int]]) -> set[BlockHash]:
        """Count these as used now, and remove what is too much; returns what went."""
        if self.options.max_bytes is None or not sizes:
            return set()
        arguments: list[Any] = [self.options.max_bytes, self._prefix, SYSTEM_CLOCK.wall()]
        for name, size in sizes:
            arguments += [name.hex(), size]
        async with self._translated():
            gone = {bytes.fromhex(name.decode()) for name in await self._kept(keys=self._keys, args=arguments)}
        self.count(evicted_blocks=len(gone))
        self.note_removed(gone)
        return gone

    async def _set_pinned(self, hashes: Sequence[BlockHash], pinned: bool) -> int:
        if not hashes:
            return 0
        async with self._translated(), self._client.pipeline(transaction=True) as pipeline:
            for block_hash in hashes:
                key = self._key(block_hash)
                pipeline.exists(key)
                if pinned:
                    pipeline.persist(key)
                    pipeline.sadd(self._keys[2], block_hash.hex())
                else:
                    pipeline.pexpire(key, _ms(self.options.ttl_s))
                    pipeline.srem(self._keys[2], block_hash.hex())
            answers = await pipeline.execute()
        return sum(map(int, answers[::3]))

    # The server.

    def _key(self, block_hash: BlockHash) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _parts(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        most = max(1, BATCH_BYTES // self.records.max_record_bytes)
        return (items[first : first + most] for first in range(0, len(items), most))

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(COMMAND_S):
                yield
        except (TimeoutError, exceptions.TimeoutError) as error:
            raise StoreError(f"the server at {self.where} does not answer") from error
        except exceptions.AuthenticationError as error:
            raise StoreError(f"the server at {self.where} wants another password: {error}") from error
        except (exceptions.ConnectionError, OSError) as error:
            raise StoreError(f"cannot reach the server at {self.where}: {error}") from error
        except exceptions.ValkeyError as error:
            said = str(error).rpartition("caused error: ")[2][:MAX_SAID]  # before it stands the whole command
            if isinstance(error, exceptions.OutOfMemoryError) or "maxmemory" in said:
                raise StoreFull(f"the server at {self.where} is full: {said}{FULL_HINT}") from None
            raise StoreError(f"the server at {self.where}: {said}") from None


class TlsValkeyStore(ValkeyStore):
    """`valkeys://` and `rediss://`: the same over TLS; the server's certificate is verified."""

    tls = True


def _pool(location: str, options: ValkeyOptions, *, tls: bool) -> Any:
    extra: dict[str, Any] = {}
    if options.password_file:
        try:
            extra["password"] = Path(options.password_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"store: cannot read password_file {options.password_file}: {error.strerror}") from error
    if tls:
        extra |= _tls_files(options) | {"ssl_check_hostname": True}  # else any certificate of the authority would do
    elif options.tls_ca or options.tls_cert or options.tls_key:
        raise ConfigError("store: tls_ca, tls_cert and tls_key are for valkeys:// and rediss://")
    _, at, place = location.rpartition("@")
    if at and place.startswith("/"):
        raise ConfigError("store: no host is named; the password for a socket goes into a file (password_file)")
    location = location[2:] if location.startswith("///") else location
    scheme = "unix:" if location.startswith("/") and not location.startswith("//") else "valkeys:" if tls else "valkey:"
    url = f"{scheme}//{location}" if scheme == "unix:" else scheme + location
    if scheme != "unix:" and not location.startswith("//"):
        raise ConfigError("store: a server is named as valkey://host:port, or unix:///path/to.socket")
    try:
        return client.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,  # a free one is waited for as long as the command may take
            socket_timeout=None,  # ours instead: within its own, Python 3.11 can lose a cancellation
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 1),
            **extra,
        )
    except ValueError as error:
        raise ConfigError(f"store: {error}") from error


def _tls_files(options: ValkeyOptions) -> dict[str, str]:
    """As the client calls them. Raises `ConfigError` for what it would pass over."""
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(options, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"store: {name} {path}: there is no such file")
    if options.tls_key and not options.tls_cert:
        raise ConfigError("store: tls_key needs tls_cert, the certificate that it belongs to")
    key = options.tls_key or options.tls_cert  # which may have both in it
    files = {"ssl_ca_certs": options.tls_ca, "ssl_certfile": options.tls_cert, "ssl_keyfile": key}
    return {name: path for name, path in files.items() if path}


def _readable(answers: Sequence[Any]) -> list[Any]:
    """None for a key that somebody gave a value of another type: it is no block, and the others are."""
    for answer in answers:
        if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
            raise answer
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _note_key(name: str) -> str:
    return f"kvferry:note:{hashlib.sha256(name.encode()).hexdigest()}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
