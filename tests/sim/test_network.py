"""Connections of the simulated network, as protocols of asyncio see them."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvferry.sim.loop import SimLoop, Simulation
from kvferry.sim.machine import SimCore
from kvferry.sim.network import WINDOW_BYTES, Network, NetworkSpec, SimTransport


class _End(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: SimTransport
        self.received = bytearray()
        self.pauses: list[bool] = []
        self.ends: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(SimTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def pause_writing(self) -> None:
        self.pauses.append(True)

    def resume_writing(self) -> None:
        self.pauses.append(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)


class _Pair:
    """A connection between hosts a and b."""

    def __init__(self, seed: int = 1, spec: NetworkSpec | None = None) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation, spec or NetworkSpec())
        self.a, self.b = (self.network.host(name).process(name).thread("t") for name in "ab")
        self.near, self.far = _End(), _End()

    def connect(self, port: int = 80) -> None:
        listener = self.b.process.host.listen(self.b.process, 80)

        def accept() -> None:
            listener.accept()[0].attach(self.b, self.far)

        self.b.add_reader(listener, accept)
        self.dial(port)

    def dial(self, port: int) -> None:
        task = self.do(self.a, lambda: self.a.create_connection(lambda: self.near, "b", port))
        self.simulation.run_until(task.done)
        task.result()

    def do(self, loop: SimLoop, make: Callable[[], Any]) -> "asyncio.Task[Any]":
        tasks: list[asyncio.Task[Any]] = []
        loop.call_soon(lambda: tasks.append(loop.create_task(make())))
        self.simulation.run_until(lambda: bool(tasks))
        return tasks[0]

    def on(self, loop: SimLoop, call: Callable[..., Any], *args: Any) -> None:
        loop.call_soon(call, *args)

    def run(self, seconds: float = 1.0) -> None:
        self.simulation.run_until(lambda: False, until=self.simulation.now + seconds)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_and_later(seed: int) -> None:
    pair = _Pair(seed, NetworkSpec(late_share=0.3, cut_share=0.5))
    with pair.simulation.running():
        pair.connect()
        begun = pair.simulation.now
        sent = b"".join(bytes([number]) * (number + 1) for number in range(200))
        for number in range(200):
            pair.on(pair.a, pair.near.transport.write, bytes([number]) * (number + 1))
        pair.simulation.run_until(lambda: len(pair.far.received) == len(sent))
        assert bytes(pair.far.received) == sent
        assert pair.simulation.now - begun >= pair.network.spec.latency_s


def test_who_sends_to_one_that_does_not_read_has_to_wait() -> None:
    pair = _Pair()
    with pair.simulation.running():
        pair.connect()
        pair.on(pair.b, pair.far.transport.pause_reading)
        pair.run()
        pair.on(pair.a, pair.near.transport.write, bytes(3 * WINDOW_BYTES))
        pair.run()
        assert pair.near.pauses == [True]
        assert pair.near.transport.get_write_buffer_size() == 2 * WINDOW_BYTES
        pair.on(pair.b, pair.far.transport.resume_reading)
        pair.run()
        assert len(pair.far.received) == 3 * WINDOW_BYTES
        assert pair.near.pauses == [True, False]


def test_a_close_comes_behind_the_bytes() -> None:
    pair = _Pair()
    with pair.simulation.running():
        pair.connect()
        pair.on(pair.a, pair.near.transport.write, b"x" * WINDOW_BYTES * 2)
        pair.on(pair.a, pair.near.transport.close)
        pair.run()
        assert len(pair.far.received) == 2 * WINDOW_BYTES
        assert (pair.near.ends, pair.far.ends, pair.network.num_open) == ([None], [None], 0)


def test_a_reset_is_an_error_at_the_other_end() -> None:
    pair = _Pair()
    with pair.simulation.running():
        pair.connect()
        pair.on(pair.a, pair.near.transport.abort)
        pair.run()
        assert [type(one) for one in pair.far.ends] == [ConnectionResetError]
        assert (pair.near.ends, pair.network.num_open) == ([None], 0)


def test_nothing_arrives_between_hosts_that_are_cut_off_and_all_of_it_afterwards() -> None:
    pair = _Pair()
    with pair.simulation.running():
        pair.connect()
        one, other = pair.a.process.host, pair.b.process.host
        pair.network.partition(one, other)
        for number in range(10):
            pair.on(pair.a, pair.near.transport.write, bytes([number]))
        pair.run(30.0)
        assert pair.far.received == b""
        pair.network.repair(one, other)
        pair.run()
        assert bytes(pair.far.received) == bytes(range(10))


def test_nobody_listens() -> None:
    pair = _Pair()
    with pair.simulation.running(), pytest.raises(ConnectionRefusedError):
        pair.connect(port=81)


def test_a_machine_without_power_says_nothing_and_a_process_that_ends_does() -> None:
    for is_up, is_told in ((True, True), (False, False)):
        pair = _Pair()
        with pair.simulation.running():
            pair.connect()
            pair.b.process.host.is_up = is_up
            pair.b.process.crash()
            pair.run(5.0)
            assert bool(pair.near.ends) is is_told
            assert pair.far.ends == []


def test_a_protocol_that_raises_ends_its_connection() -> None:
    pair = _Pair()

    def fail(data: bytes) -> None:
        raise ValueError("a mistake")

    with pair.simulation.running():
        pair.connect()
        pair.far.data_received = fail  # type: ignore[method-assign,assignment]
        pair.on(pair.a, pair.near.transport.write, b"x")
        pair.run()
        assert [type(one) for one in pair.near.ends] == [ConnectionResetError]
        assert [type(one) for one in pair.far.ends] == [ValueError]
        assert "a mistake" in pair.simulation.errors[0]["message"]


@pytest.mark.parametrize(("others_compute_s", "takes_s"), [(0.0, 0.1), (0.05, 0.15), (9.0, 0.2)])
def test_what_arrives_is_read_on_a_core_that_others_have_too(others_compute_s: float, takes_s: float) -> None:
    pair = _Pair(spec=NetworkSpec(latency_s=0.1, jitter_s=0.0, late_share=0.0, cut_share=0.0))
    with pair.simulation.running():
        pair.connect()
        core = SimCore(pair.network.loop)
        pair.b.process.host.cores = [core]
        if others_compute_s:
            pair.do(pair.b, lambda: core.compute(others_compute_s))
        begun = pair.simulation.now
        pair.on(pair.a, pair.near.transport.write, b"x")
        pair.simulation.run_until(lambda: bool(pair.far.received))
        assert pair.simulation.now - begun == pytest.approx(takes_s)


def test_the_least_busy_core_reads_and_not_that_of_the_sender() -> None:
    pair = _Pair()
    with pair.simulation.running():
        idle, busy, senders = (SimCore(pair.network.loop) for _ in range(3))
        source = pair.a.process.host
        source.cores = [senders]
        busy.spend(1.0, lambda: None)
        assert all(pair.network.core_of([busy, senders, idle], source) is idle for _ in range(9))
        assert {pair.network.core_of([busy, senders], source) for _ in range(99)} == {busy, senders}
