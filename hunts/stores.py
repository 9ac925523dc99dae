"""Stores of simulated instances, drawn from a seed: small ones, so that blocks are evicted all the time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from kvferry.sim.engine import SimInstanceSpec
from kvferry.store.codecs.none import NoCodec
from kvferry.store.eviction.table import EXTENSIONS
from kvferry.store.media.file import FileOptions
from kvferry.store.record import RecordFormat
from kvferry.store.table import find_store

TIMEOUT_S = 1.0
FOLDER = "/kv"


def draw_store(random: Random, instance: SimInstanceSpec) -> SimInstanceSpec:
    """The instance with a store: beside the P2P connector, before it, or alone, so that it hands off."""
    settings = _settings(random, instance)
    store = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": settings}
    p2p = {"kv_connector": instance.connector, "kv_connector_extra_config": instance.options}
    match random.choice(("alone", "alone", "second", "second", "first")):
        case "alone":
            return replace(instance, connector="KVStoreConnector", options=settings)
        case "second":
            listed = [p2p, store]
        case _:
            listed = [store, p2p]
    return replace(instance, connector="MultiConnector", options={"connectors": listed})


def _settings(random: Random, instance: SimInstanceSpec) -> dict[str, Any]:
    eviction = random.choice(sorted(EXTENSIONS.table))
    memory = f"memory:?num_blocks={random.choice((4, 20, 100))}&eviction={eviction}"
    layout = instance.layout()
    block_bytes = RecordFormat(layout, NoCodec(layout)).max_record_bytes
    room = random.choice(("", f"&max_bytes={random.choice((8, 40, 200)) * block_bytes}&eviction={eviction}"))
    codec = random.choice(("none", "none", "lossless"))
    file = f"file:{FOLDER}?codec={codec}&threads={random.choice((1, 4))}{room}"
    return {
        "store": random.choice(([file], [memory], [memory, file], [memory, file])),
        "write": random.choice(("through", "back")),
        "load_policy": random.choice(("always", "always", "measured")),
        "prefetch": random.random() < 0.7,
        "timeout_s": TIMEOUT_S,
    }


def capacity_of(instance: SimInstanceSpec) -> int | None:
    """Bytes that the files of its store may take, if that is limited."""
    listed = instance.options.get("connectors", [{"kv_connector_extra_config": instance.options}])
    urls = [url for connector in listed for url in connector.get("kv_connector_extra_config", {}).get("store", ())]
    return next((max_bytes for max_bytes in map(_room, urls) if max_bytes is not None), None)


@cache
def _room(url: str) -> int | None:
    options = find_store(url).options
    return options.max_bytes if isinstance(options, FileOptions) else None
