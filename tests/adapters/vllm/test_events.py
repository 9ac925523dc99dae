"""A subscriber to vLLM's KV events hears of the shared storage, under the names that vLLM gives to the same blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.vllm_process import WAIT_S, VllmProcess
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

STORE = "KvferrySharedStorageConnector"
BLOCK = 32
BLOCK_FILE_BYTES = 49152 + 500
WAIT_MS = 20_000

Batch = list[Any]


class Subscriber:
    """Takes what is published at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        import zmq
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        self._decode = Decoder(KVEventBatch).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def batch(self, timeout_ms: int = WAIT_MS) -> Batch | None:
        """The next one's events; None: there is none."""
        if not self._socket.poll(timeout_ms):
            return None
        return list(self._decode(self._socket.recv_multipart()[-1]).events)

    def until(self, condition: Callable[[Batch], bool]) -> Batch:
        """All events from now on, until there are enough."""
        events: Batch = []
        while not condition(events):
            batch = self.batch()
            assert batch is not None, f"no more than {events}"
            events += batch
        return events

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    subscriber = Subscriber(endpoint_in(tmp_path))
    yield subscriber
    subscriber.close()


def endpoint_in(folder: Path) -> str:
    return f"ipc://{folder}/events"


def start(start_vllm: VllmMaker, folder: Path, *, more: dict[str, Any] | None = None, **extra: Any) -> VllmProcess:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint_in(folder))
    storage = connector(STORE, shared_storage_path=str(folder / "store"), **extra)
    return start_vllm(storage, kv_events_config=events, **(more or {})).ready()


def subscribe(subscriber: Subscriber, process: VllmProcess, prompt_of: PromptMaker) -> None:
    """Whoever subscribes late has missed the first: go on until something comes, and take all of it."""
    for _ in range(20):
        process.run(prompt_of(BLOCK), 1)
        process.settled()
        if subscriber.batch(500) is not None:
            break
    else:
        raise AssertionError("nothing is published")
    while subscriber.batch(500) is not None:
        pass


def stored(events: Batch, medium: str) -> dict[Any, tuple[Any, ...]]:
    """By hash: parent, tokens, and all else that is said of a block."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if type(event).__name__ != "BlockStored" or event.medium != medium:
            continue
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            keys = event.extra_keys[index] if event.extra_keys else None
            found[name] = (parent, tokens, event.block_size, keys, event.group_idx, event.lora_name)
            parent = name
    return found


def removed(events: Batch, medium: str) -> set[Any]:
    kinds = [event for event in events if type(event).__name__ == "BlockRemoved" and event.medium == medium]
    return {name for event in kinds for name in event.block_hashes}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_have_vllms_names(
    start_vllm: VllmMaker, subscriber: Subscriber, prompt_of: PromptMaker, tmp_path: Path, num_ranks: int
) -> None:
    process = start(start_vllm, tmp_path, more={"tensor_parallel_size": num_ranks, "max_num_batched_tokens": 64})
    subscribe(subscriber, process, prompt_of)
    prompt = prompt_of(5 * BLOCK + 7)
    process.run(prompt, 3)
    process.settled()
    events = subscriber.until(lambda events: len(stored(events, "STORAGE")) >= 5)
    in_store = stored(events, "STORAGE")
    assert in_store == stored(events, "GPU")
    assert [tokens for _, tokens, *_ in in_store.values()] == [
        prompt[i : i + BLOCK] for i in range(0, 5 * BLOCK, BLOCK)
    ]


def test_what_the_store_has_removed_is_said(
    start_vllm: VllmMaker, subscriber: Subscriber, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    process = start(start_vllm, tmp_path, max_bytes=10 * BLOCK_FILE_BYTES)
    subscribe(subscriber, process, prompt_of)
    seen: Batch = []
    for _ in range(3):
        process.run(prompt_of(6 * BLOCK), 1)
        process.settled()
    seen = subscriber.until(lambda events: len(stored(events, "STORAGE")) == 18)
    while (batch := subscriber.batch(500)) is not None:
        seen += batch
    gone, there = removed(seen, "STORAGE"), stored(seen, "STORAGE").keys()
    assert gone & there
    assert len(there - gone) == len(list((tmp_path / "store").rglob("*.kv")))
    assert not removed(seen, "GPU")


def test_without_events_nothing_is_kept_for_them(start_vllm: VllmMaker, prompt_of: PromptMaker, tmp_path: Path) -> None:
    process = start_vllm(connector(STORE, shared_storage_path=str(tmp_path))).ready()
    process.run(prompt_of(100), 1)
    until(lambda: process.settled().figures["stored_blocks"] == 3, WAIT_S)
