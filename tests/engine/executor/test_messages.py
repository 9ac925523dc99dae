"""What ranks say to each other, through a real pipe."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvferry.connectors.p2p.plan import Load, P2pPlan
from kvferry.core.errors import PeerLost, ProtocolError
from kvferry.core.messages.hand_off import PrefillResult, Ticket, TokenLogprobs
from kvferry.core.messages.wire import Pipe
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor.messages import (
    Check,
    Close,
    Done,
    LoadModel,
    ModelLoaded,
    OpenCache,
    Opened,
    Ping,
    Pong,
    Proceed,
    RankFailed,
    RankStep,
    TableAnswer,
    TableRequest,
    engine_end,
    rank_end,
)
from kvferry.engine.model_runner import StepInputs


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    ours, theirs = socket.socketpair()
    pipes = engine_end(ours.detach()), rank_end(theirs.detach())
    yield pipes
    for pipe in pipes:
        pipe.close()


LOOK = TableRequest("look", ("a", "b"))
COMMANDS = [
    LoadModel(
        1,
        EngineConfig(model="m", kv_cache_memory="1GiB", tensor_parallel_size=2),
        KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config={"lease_s": 3.5, "list": [1, "a"]}),
    ),
    OpenCache(7),
    RankStep(StepInputs([1, 2], [2], [5], [5], [[0, 9]], [1]), [b"late", b"plan"], 7, 1),
    RankStep(None, [], 0, 0),
    Proceed(),
    Ping(),
    Check(),
    Close(),
    TableAnswer(has_all=True, value=b"\0"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_arrive_as_they_were(command: Any, ends: tuple[Pipe, Pipe]) -> None:
    ends[0].send(command)
    assert ends[1].receive() == command


@pytest.mark.parametrize(
    "message",
    [
        ModelLoaded("f", 3),
        Opened(None),
        Opened({"port": 5}),
        Done(b"x", 4, "why"),
        RankFailed("E", "why"),
        LOOK,
        Pong(),
    ],
)
def test_messages_arrive_as_they_were(message: Any, ends: tuple[Pipe, Pipe]) -> None:
    ends[1].send(message)
    assert ends[0].receive() == message


def test_a_plan_arrives_as_it_was() -> None:
    result = PrefillResult(first_token=3, seed=2**62, logprobs=TokenLogprobs(3, -0.5, 1, {3: -0.5, 9: -2.0}))
    ticket = Ticket(transfer_id="t", prefill_result=result)
    plan = P2pPlan(loads={"r": Load("r", ticket, [1, 2], 0, 9, list(range(9)))})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=P2pPlan) == plan


def test_the_end_of_the_other_side_is_noticed(ends: tuple[Pipe, Pipe]) -> None:
    ends[0].close()
    with pytest.raises(PeerLost):
        ends[1].receive()
    with pytest.raises(PeerLost):
        ends[1].send(Check())


def test_what_is_no_message_is_refused() -> None:
    ours, theirs = socket.socketpair()
    pipe = rank_end(theirs.detach())
    body = msgspec.msgpack.encode(["Nonsense", 1])
    ours.sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ProtocolError):
        pipe.receive()
    ours.sendall((2**31 - 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError):  # longer than any message is: not read at all
        pipe.receive()
    ours.close()
    pipe.close()


def test_nobody_waits_for_ever_for_one_who_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    pipe = rank_end(ours.detach(), send_s=1)
    start = time.monotonic()
    with pytest.raises(PeerLost):
        pipe.send(Done(os.urandom(16 * 2**20), 0))
    assert time.monotonic() - start < 30
    pipe.close()
    theirs.close()
