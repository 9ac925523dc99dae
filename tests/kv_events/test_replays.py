"""Replays: slow followers get all of theirs, silent ones keep nobody waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kv_events.events import ask_again
from kvferry.core.clock import ManualClock
from kvferry.kv_events.messages import (
    END_OF_REPLAY,
    BlockStored,
)
from kvferry.kv_events.publisher import KVEventPublisher, Replays


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4)
    yield publisher
    publisher.close()


def test_a_slow_follower_gets_all_that_is_kept() -> None:
    """However far it is beyond what ZeroMQ lets wait by default, and what lies in the sockets of the system."""
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4000)
    context = zmq.Context()
    try:
        event = BlockStored(block_hashes=[b"x" * 12_000], parent_block_hash=None, token_ids=[], block_size=2)
        for _ in range(4000):
            publisher.publish([event])
        slow = ask_again(context, publisher.addresses.replay_endpoint, 0)
        assert slow.recv_multipart()[-2] == bytes(8)
        after = ask_again(context, publisher.addresses.replay_endpoint, 4000)
        assert after.recv_multipart()[-2] == END_OF_REPLAY, "it is answered once the first is"
        numbers = [slow.recv_multipart()[-2] for _ in range(4000)]
        assert numbers[-1] == END_OF_REPLAY
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_callers_that_never_read_keep_nobody_waiting_and_are_given_up() -> None:
    clock = ManualClock()
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, clock, max_history=2000)
    context = zmq.Context()
    try:
        event = BlockStored(block_hashes=[b"x" * 12_000], parent_block_hash=None, token_ids=[], block_size=2)
        for _ in range(2000):
            publisher.publish([event])
        silent = [ask_again(context, publisher.addresses.replay_endpoint, 0) for _ in range(Replays.max_replays)]
        for one in silent:
            one.poll(60_000)
        late = ask_again(context, publisher.addresses.replay_endpoint, 1999)
        assert not late.poll(300), "there are too many"
        clock.advance(Replays.stall_s)
        while not late.poll(100):
            late.send_multipart([b"", (1999).to_bytes(8, "big")])
        assert late.recv_multipart()[-2] == (1999).to_bytes(8, "big")
        assert late.recv_multipart()[-2] == END_OF_REPLAY
    finally:
        context.destroy(linger=0)
        publisher.close()
