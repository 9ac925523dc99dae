"""How ranks that rank 0 has not started come to it, and who is not let in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, RankLost
from kvferry.core.messages import wire
from kvferry.core.messages.wire import Pipe
from kvferry.engine.executor import link
from kvferry.engine.executor.link import Link, RankListener, join
from kvferry.engine.executor.messages import Check, Checked, Close, rank_end
from support.ports import free_port

TOKEN, LONG_S = "a token of all ranks", 60.0


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with closing(RankListener(f"127.0.0.1:{free_port()}", TOKEN)) as made:
        yield made


@pytest.fixture
def in_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def gathering(pool: ThreadPoolExecutor, listener: RankListener, number: int = 1) -> Future[list[Link]]:
    return pool.submit(listener.wait_for_ranks, number, LONG_S, lambda number: None)


def test_ranks_come_and_both_sides_talk(listener: RankListener, in_thread: ThreadPoolExecutor) -> None:
    joining = [in_thread.submit(join, listener.address, TOKEN, LONG_S) for _ in range(2)]
    ours = gathering(in_thread, listener, 2).result()
    for one in ours:
        one.pipe.send(Check())
    for rank in (one.result() for one in joining):
        assert rank.address == "127.0.0.1"
        assert rank.pipe.receive() == Check()
        rank.pipe.send(Checked("a leak"))
        rank.pipe.close()
    for one in ours:
        assert one.pipe.receive() == Checked("a leak")
        with pytest.raises(PeerLost):
            one.pipe.receive()
        assert "on 127.0.0.1" in one.name
        one.pipe.close()


class BriefListener(RankListener):
    handshake_s = 2.0


def test_strangers_keep_nobody_out(in_thread: ThreadPoolExecutor) -> None:
    """Some say nothing, some say nonsense, and one has another token; the rank comes in after the silent ones' time."""
    with ExitStack() as strangers:
        listener = strangers.enter_context(closing(BriefListener(f"127.0.0.1:{free_port()}", TOKEN)))
        where = listener.address.split(":")
        ours = gathering(in_thread, listener)
        for number in range(listener.max_handshakes + 4):
            one = strangers.enter_context(socket.create_connection((where[0], int(where[1]))))
            one.sendall(b"" if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConfigError, match="it refuses this rank: it does not hold the same KVFERRY_AUTH_TOKEN"):
            join(listener.address, "another token", LONG_S)
        rank = join(listener.address, TOKEN, LONG_S)
        [found] = ours.result()
        rank.pipe.close()
        found.pipe.close()


def test_who_only_listens_at_the_address_of_rank_0_is_no_rank_0(in_thread: ThreadPoolExecutor) -> None:
    """It cannot prove itself, whatever it repeats."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def repeat() -> None:
            connected, _ = other.accept()
            with connected:
                connected.sendall(connected.recv(65536))

        echoed = in_thread.submit(repeat)
        with pytest.raises(ConfigError, match=r"rank 0 at 127\.0\.0\.1:\d+: "):
            join(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, LONG_S)
        echoed.result()


def test_another_version_is_refused_by_name(listener: RankListener, in_thread: ThreadPoolExecutor) -> None:
    ours = in_thread.submit(listener.wait_for_ranks, 1, 3.0, lambda number: None)
    host, port = listener.address.split(":")
    with closing(Pipe(socket.create_connection((host, int(port))).detach(), link.RankRefused)) as pipe:
        pipe.send(link.RankHello("kvferry 0.0.1", "a rank", bytes(32)))
        assert "it runs kvferry 0.0.1, and rank 0 kvferry" in pipe.receive().reason
    with pytest.raises(RankLost, match=r"0 of 1 other ranks came .* refused: .*kvferry 0\.0\.1"):
        ours.result()


def test_a_rank_that_does_not_come_is_missed_in_time(listener: RankListener) -> None:
    with pytest.raises(RankLost, match=f"0 of 3 other ranks came to {listener.address} within 0.2 s; start each with"):
        listener.wait_for_ranks(3, 0.2, lambda number: None)
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(RankLost, match=f"rank 0 is not at {nobody}"):
        join(nobody, TOKEN, 0.2)


def test_a_rank_too_many_loses_its_connection(listener: RankListener, in_thread: ThreadPoolExecutor) -> None:
    ours = gathering(in_thread, listener)
    first = join(listener.address, TOKEN, LONG_S)
    [found] = ours.result()
    late = in_thread.submit(join, listener.address, TOKEN, 1.0)
    listener.close()
    try:
        extra = late.result()
    except RankLost:
        pass
    else:
        with pytest.raises(PeerLost):
            extra.pipe.receive()
        extra.pipe.close()
    first.pipe.close()
    found.pipe.close()


@pytest.mark.parametrize("address", ["", "7000", "host", "host:0", "host:99999", "h:1/x", "u@h:1", "[::1", "::1:5"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        RankListener(address, TOKEN)


def test_an_address_of_another_machine_or_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ranks-at 192\.0\.2\.1:7000: cannot listen there"):
        RankListener("192.0.2.1:7000", TOKEN)
    with pytest.raises(ConfigError, match="--ranks-at needs KVFERRY_AUTH_TOKEN"):
        RankListener("127.0.0.1:7000", "")


@pytest.mark.parametrize("change", ["modified", "repeated", "left out"])
def test_a_frame_that_somebody_changes_on_the_way_is_refused(change: str) -> None:
    keys = (b"there" * 6, b"back" * 6)
    ours, between = socket.socketpair()
    onward, theirs = socket.socketpair()
    sender, receiver = rank_end(ours.detach(), keys), rank_end(theirs.detach(), (keys[1], keys[0]))

    def carry() -> None:
        frames = []
        for _ in range(3):
            header = between.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)
            frames.append(bytearray(header + between.recv(int.from_bytes(header), socket.MSG_WAITALL)))
        match change:
            case "modified":
                frames[1][6] ^= 1
            case "repeated":
                frames[1] = frames[0]
            case "left out":
                del frames[1]
        onward.sendall(b"".join(frames))

    carrying = threading.Thread(target=carry)
    carrying.start()
    for command in (Check(), Check(), Close()):
        sender.send(command)
    carrying.join()
    assert receiver.receive() == Check()
    with pytest.raises(ProtocolError, match="modified, left out or repeated"):
        receiver.receive()
    for one in (sender, receiver, between, onward):
        one.close()
