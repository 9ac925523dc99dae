"""Instances' data planes over regions of KV blocks, for tests of everything that moves blocks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.blocks.sharding import on_rank
from kvferry.testing import fabric
from kvferry.testing.kv import BlockRegion, make_layout, soon, table_for
from kvferry.transport.lookup_buffer.base import Source
from kvferry.transport.options import TransportOptions
from kvferry.transport.shared_memory import owned_segment_names
from kvferry.transport.tls import ChannelTls, channel_tls

sys.path.insert(0, str(Path(__file__).parents[2]))  # of scripts that are run by themselves
from support.certificates import for_children, member_options
from support.warm import Forked

__all__ = [
    "BlockRegion",
    "Node",
    "ProducerProcess",
    "make_layout",
    "no_leftovers",
    "sharded",
    "soon",
    "table_for",
    "tls_of",
]


def sharded(layout: KVLayout, tp_size: int, *, whole: bool = False) -> KVLayout:
    """The first rank's layout where `tp_size` ranks split the heads; with `whole`, each has all of them."""

    def shard(layer: LayerLayout) -> LayerLayout:
        total = layer.model_kv_heads
        return msgspec.structs.replace(
            layer, num_kv_heads=total if whole else max(1, total // tp_size), total_kv_heads=total
        )

    layers = tuple(map(shard, layout.layers))
    return on_rank(msgspec.structs.replace(layout, layers=layers, tp_size=tp_size), 0)


def tls_of(transport: str) -> ChannelTls | None:
    """Where the name of a transport begins with "tls-"."""
    return channel_tls(TransportOptions(**member_options())) if transport.startswith("tls-") else None


class Node(fabric.Node):
    """One over a transport that is named alone, or with "tls-" before it."""

    def __init__(self, region: BlockRegion, transport: str = "auto", **more: Any) -> None:
        options = TransportOptions(transport=transport.removeprefix("tls-"))
        super().__init__(region, options, tls=tls_of(transport), **more)


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Assert that the body leaves no thread and no segment behind."""
    threads, segments = set(threading.enumerate()), set(owned_segment_names())
    yield
    new = [thread for thread in threading.enumerate() if thread not in threads]
    left = [thread.name for thread in new if not thread.daemon or "kvferry" in thread.name]
    assert not left, f"threads left: {left}"
    assert set(owned_segment_names()) == segments


class ProducerProcess:
    """`producer_process.py`, running. Forked: to import torch anew for each would cost two seconds."""

    def __init__(self, transport: str, *, num_blocks: int = 16, seed: int = 1, block_size: int = 4) -> None:
        from producer_process import produce

        environment = {**os.environ, **(for_children() if transport.startswith("tls-") else {})}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = Forked(produce, theirs.fileno(), environment, transport, num_blocks, seed, block_size)
            self._told = ours.makefile("rw", buffering=1)
        self.where = json.loads(self._told.readline())
        self.source = Source(self.where["host"], self.where["port"])

    def tell(self, *words: object) -> None:
        """Have it do something, and wait until it is done."""
        self._told.write(" ".join(str(word) for word in words) + "\n")
        assert self._told.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._told.close()
