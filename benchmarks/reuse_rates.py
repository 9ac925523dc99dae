"""Bytes a second that stores write and read, beside their media with pieces of the same size.

The sides take turns, and the first turn, in which memory is touched for the first time, does not count.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.core.blocks.layout import KVLayout
from kvferry.store.base import Block, BlockRead, KVStore
from kvferry.store.media.lmcache_client import _request
from kvferry.store.table import find_store

BATCH = 32
ROUNDS = 5
PUT, GET, HEALTH = 1, 2, 5
"""Of LMCache's protocol."""
Rates = dict[str, float]
"""`put_GBps` and `get_GBps`."""


def measure_rates(media: dict[str, str], layout: KVLayout, num_blocks: int, folder: Path) -> dict[str, Any]:
    """Each medium through its store, and by itself."""
    results: dict[str, Any] = {}
    for name, url in media.items():
        for label, before in variants(name, folder):
            limit = _limits(name, url, layout.block_bytes, num_blocks, folder, before)
            results[label] = asyncio.run(_in_turns(url, layout, num_blocks, before, limit))
            print(f"{label}: {results[label]}", flush=True)
    return results


def variants(name: str, folder: Path) -> list[tuple[str, Callable[[], object]]]:
    """The ways to read a medium: label, and the preparation."""
    if name != "file":
        return [(name, lambda: None)]
    return [("file, warm", lambda: None), ("file, cold", lambda: drop_page_cache(folder))]


def drop_page_cache(folder: Path) -> None:
    """Of all files below it, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


async def _in_turns(
    url: str, layout: KVLayout, num_blocks: int, before_get: Callable[[], object], limit: Callable[[], Rates]
) -> dict[str, Any]:
    """Medians of both sides, and of the ratio in each turn."""
    store: KVStore = find_store(url).make(layout)
    await store.open()
    turns: list[tuple[Rates, Rates]] = []
    try:
        for _ in range(ROUNDS + 1):
            turns.append((await _through(store, num_blocks, before_get), limit()))
    finally:
        await store.close()
    mine, theirs = zip(*turns[1:], strict=True)
    names = [name for name in ("put_GBps", "get_GBps") if all(name in medium for medium in theirs)]
    return {
        "store": _medians(mine),
        "medium": _medians(theirs),
        "store_of_medium": {
            name.removesuffix("_GBps"): statistics.median(first[name] / other[name] for first, other in turns[1:])
            for name in names
        },
    }


def _medians(turns: Sequence[Rates]) -> Rates:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


async def _through(store: KVStore, num_blocks: int, before_get: Callable[[], object]) -> Rates:
    """As many blocks as the document has, in batches, put and got and deleted."""
    layout = store.layout
    sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
    content = memoryview(random.Random(2).randbytes(layout.block_bytes))
    names = [os.urandom(32) for _ in range(num_blocks)]
    starts = [sum(sizes[:layer]) for layer in range(len(sizes))]
    parts = [content[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    began = time.perf_counter()
    for first in range(0, num_blocks, BATCH):
        await store.put([Block(name, parts) for name in names[first : first + BATCH]])
    put_s = time.perf_counter() - began
    reads = [BlockRead(name, [memoryview(bytearray(size)) for size in sizes]) for name in names]
    before_get()
    began = time.perf_counter()
    for first in range(0, num_blocks, BATCH):
        if not all(await store.get(reads[first : first + BATCH])):
            raise RuntimeError(f"{type(store).__name__}: a block is gone")
    get_s = time.perf_counter() - began
    await store.delete(names)
    return _rates(num_blocks * layout.block_bytes, put_s, get_s)


def _rates(num_bytes: int, put_s: float, get_s: float) -> Rates:
    return {"put_GBps": num_bytes / 1e9 / put_s, "get_GBps": num_bytes / 1e9 / get_s}


# The media themselves.


def _limits(
    name: str, url: str, size: int, number: int, folder: Path, before_get: Callable[[], object]
) -> Callable[[], Rates]:
    """The functions that measure a medium once."""
    port = url.partition("?")[0].rpartition(":")[2]
    match name:
        case "file":
            return lambda: file_limit(folder / "plain", size, number, before_get)
        case "memory":
            arena = memoryview(bytearray(b"1" * (size * number)))
            return lambda: memory_limit(arena, size, number)
        case "valkey":
            return lambda: valkey_limit(port, size, number)
        case "mooncake":
            return lambda: mooncake_limit(url, size, number)
        case "lmcache":
            return lambda: lmcache_limit(int(port), size, number)
    return dict


def file_limit(folder: Path, size: int, number: int, before_get: Callable[[], object]) -> Rates:
    """Plain files of that size, written and read one after the other."""
    folder.mkdir(exist_ok=True)
    content, into = random.Random(2).randbytes(size), [bytearray(size) for _ in range(number)]
    began = time.perf_counter()
    for index in range(number):
        with (folder / str(index)).open("wb", buffering=0) as file:
            file.write(content)
    put_s = time.perf_counter() - began
    before_get()
    began = time.perf_counter()
    for index in range(number):
        with (folder / str(index)).open("rb", buffering=0) as file:
            file.readinto(into[index])
    get_s = time.perf_counter() - began
    shutil.rmtree(folder)
    return _rates(size * number, put_s, get_s)


def memory_limit(arena: memoryview, size: int, number: int) -> Rates:
    """Memory copied to places that are touched already, and from there to others."""
    source, back = memoryview(random.Random(2).randbytes(size)), [memoryview(bytearray(size)) for _ in range(number)]
    began = time.perf_counter()
    for index in range(number):
        arena[index * size : (index + 1) * size] = source
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    for index in range(number):
        back[index][:] = arena[index * size : (index + 1) * size]
    return _rates(size * number, put_s, time.perf_counter() - began)


def valkey_limit(port: str, size: int, number: int) -> Rates:
    """The server's own program: values of that size under as many keys, which are all there, four at a time."""
    program = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    if program is None:
        return {}
    import valkey

    with valkey.Valkey(port=int(port)) as client:
        content = random.Random(2).randbytes(size)
        for index in range(number):
            client.set(f"key:{index:012d}", content)
        counts = ["-n", str(2 * number), "-r", str(number)]
        command = [program, "-p", port, "-d", str(size), *counts, "-c", "1", "-P", "4", "-t", "set,get", "--csv"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        client.delete(*(f"key:{index:012d}" for index in range(number)))
    rates = dict(re.findall(r'"(SET|GET)","([0-9.]+)"', output))
    return {"put_GBps": float(rates["SET"]) * size / 1e9, "get_GBps": float(rates["GET"]) * size / 1e9}


_clients: dict[str, Any] = {}


def mooncake_limit(url: str, size: int, number: int) -> Rates:
    """Its own client, one value a call."""
    from mooncake.store import MooncakeDistributedStore

    address = url.removeprefix("mooncake://").partition("?")[0]
    if address not in _clients:
        _clients[address] = MooncakeDistributedStore()
        if _clients[address].setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 256 << 20, "tcp", "", address):
            raise RuntimeError("Mooncake's own client does not join")
    client, content = _clients[address], random.Random(2).randbytes(size)
    began = time.perf_counter()
    for index in range(number):
        if client.put(f"limit{index}", content):
            raise RuntimeError("Mooncake's own client keeps no value")
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    for index in range(number):
        client.get(f"limit{index}")
    get_s = time.perf_counter() - began
    for index in range(number):
        client.remove(f"limit{index}", True)
    return _rates(size * number, put_s, get_s)


def lmcache_limit(port: int, size: int, number: int) -> Rates:
    """Its server's protocol over one plain socket, one value after the other, with nothing verified."""
    content, into = random.Random(2).randbytes(size), [memoryview(bytearray(size)) for _ in range(number)]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        for index in range(number):
            connection.sendall(_request(PUT, f"limit@1@0@{index:x}@uint8", size) + content)
        connection.sendall(_request(HEALTH, "limit@1@0@0@uint8", 0))
        _receive(connection, memoryview(bytearray(36)))
        put_s = time.perf_counter() - began
        began = time.perf_counter()
        for index in range(number):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            connection.sendall(_request(GET, f"limit@1@0@{index:x}@uint8", 0))
            _receive(connection, memoryview(bytearray(36)))
            _receive(connection, into[index])
        get_s = time.perf_counter() - began
    return _rates(size * number, put_s, get_s)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while len(into):
        into = into[connection.recv_into(into) :]
