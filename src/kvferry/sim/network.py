"""A simulated network: hosts, listening sockets, TCP connections, and what can go wrong with them.

Bytes arrive in order, after the latency of the link and the time that they take at its bandwidth, in pieces that may
be cut anywhere. At most `WINDOW_BYTES` of a connection are on their way or unread at the other end: who writes further
has to wait, and is told so (`pause_writing`). While two hosts are cut off from each other, nothing arrives; what was
sent arrives when they see each other again, as TCP repeats it. A process that ends resets its connections; a machine
that ends says nothing.

Owns hosts, sockets and connections. `Network.loop` is where things happen from outside: it belongs to no machine.
"""

from __future__ import annotations

import asyncio
import errno
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

from kvferry.core.errors import ConfigError
from kvferry.sim.loop import SimLoop, SimProcess, Simulation
from kvferry.sim.machine import SimCore

WINDOW_BYTES = 256 * 1024
HIGH_WATER_BYTES = 64 * 1024
BACKLOG = 2048
CONNECT_S = 127.0
"""Seconds after which Linux gives up a connection to which nobody answers."""
_FIRST_PORT = 32768
_Mark = Literal["end", "reset"]
_END: Final = "end"
_RESET: Final = "reset"
_NO_CONTEXT = Context()
"""The context in which what comes from outside happens."""


@dataclass(frozen=True)
class NetworkSpec:
    """One link for all pairs of hosts. Times in seconds, bandwidth in bytes per second for each host and direction.

    `peer_s`: the latency between connectors, and of reads of another instance's blocks; `late_share`: of all pieces,
    those that take up to `late_s` longer; `cut_share`: those that arrive in two parts.
    """

    latency_s: float = 50e-6
    peer_s: float = 50e-6
    jitter_s: float = 20e-6
    bandwidth: float = 10e9
    late_share: float = 0.0005
    late_s: float = 0.02
    cut_share: float = 0.02


class SimHost:
    """A machine with one address, or some cores of one."""

    def __init__(self, network: Network, address: str) -> None:
        self.network, self.address = network, address
        self.cores: Sequence[SimCore] = ()
        """On which what arrives is read; empty: on others, that nothing else needs."""
        self.listeners: dict[int, ListeningSocket] = {}
        self.is_up = True
        self.clock_s = 0.0
        """How far its wall clock is ahead."""
        self.sends_free_at = self.receives_free_at = 0.0
        self._port = _FIRST_PORT

    def process(self, name: str) -> SimProcess:
        """A new process on this host."""
        return SimProcess(self.network.simulation, self, name)

    def free_port(self) -> int:
        """A port that nobody has had."""
        self._port += 1
        return self._port

    def listen(self, process: SimProcess, port: int) -> ListeningSocket:
        """A listening socket. Raises `ConfigError` if the port is taken."""
        port = port or self.free_port()
        if port in self.listeners:
            raise ConfigError(f"cannot listen on {self.address}:{port}: Address already in use")
        listener = self.listeners[port] = ListeningSocket(self, process, port)
        return listener


class ListeningSocket:
    """A listening socket, as far as `http.door` uses a `socket.socket`."""

    def __init__(self, host: SimHost, process: SimProcess, port: int) -> None:
        self._host, self._process, self._port = host, process, port
        self._waiting: deque[AcceptedSocket] = deque()
        self._watcher: tuple[SimLoop, Callable[..., Any], tuple[Any, ...]] | None = None
        process.on_end[self] = self.close

    def getsockname(self) -> tuple[str, int]:
        """Address and port."""
        return self._host.address, self._port

    def watched_by(self, loop: SimLoop, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call back for each connection that waits."""
        self._watcher = loop, callback, args
        for _ in self._waiting:
            self._wake()

    def unwatch(self) -> bool:
        """Call nobody any more."""
        was_watched, self._watcher = self._watcher is not None, None
        return was_watched

    def _wake(self) -> None:
        if self._watcher is not None:
            loop, callback, args = self._watcher
            loop.call_soon(callback, *args)

    def reached_by(self, accepted: AcceptedSocket) -> bool:
        """Record that a connection has come; False if too many wait."""
        if len(self._waiting) >= BACKLOG:
            return False
        self._waiting.append(accepted)
        self._wake()
        return True

    def accept(self) -> tuple[AcceptedSocket, tuple[str, int]]:
        """The next connection. Raises `BlockingIOError` if none waits."""
        if not self._waiting:
            raise BlockingIOError
        accepted = self._waiting.popleft()
        return accepted, accepted.transport.peer.sockname

    def close(self) -> None:
        """Free the port; connections that wait are reset."""
        self._process.on_end.pop(self, None)
        self._watcher = None
        if self._host.listeners.get(self._port) is self:
            del self._host.listeners[self._port]
        while self._waiting:
            self._waiting.popleft().close()


class AcceptedSocket:
    """A connection that has been made and has no protocol yet."""

    def __init__(self, transport: SimTransport) -> None:
        self.transport = transport

    def setblocking(self, flag: bool) -> None:
        """Ignored: no call blocks here."""

    def adopted_by(self, loop: SimLoop, protocol: asyncio.Protocol) -> SimTransport:
        """Give what comes to this protocol from now on."""
        self.transport.begin(loop, protocol)
        return self.transport

    def close(self) -> None:
        """Reset it."""
        self.transport.break_off(tell="reset")


class SendBuffer:
    """What one end of a connection has written, and the connection has not taken yet."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self.num_bytes = 0
        self.set_limits(None, None)

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Number of bytes above which the writer has to wait, and down to which it has to."""
        self.high = HIGH_WATER_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low

    def append(self, data: bytes) -> None:
        """More is written."""
        self._pieces.append(data)
        self.num_bytes += len(data)

    def take(self, most: int) -> bytes:
        """The oldest piece, or as many bytes of it as may be taken."""
        piece = self._pieces.popleft()
        if len(piece) > most:
            self._pieces.appendleft(piece[most:])
            piece = piece[:most]
        self.num_bytes -= len(piece)
        return piece

    def clear(self) -> None:
        """Nothing of it is sent."""
        self._pieces.clear()
        self.num_bytes = 0


class SimTransport(asyncio.Transport):
    """One end of a connection. Called on its own loop only, except by the other end's arrivals."""

    peer: SimTransport

    def __init__(self, network: Network, process: SimProcess, sockname: tuple[str, int]) -> None:
        super().__init__()
        self._network, self.process, self.sockname = network, process, sockname
        self.is_of_connectors = False
        """True if it is between two connectors."""
        self._loop: SimLoop | None = None
        self._protocol: asyncio.Protocol
        self._unsent = SendBuffer()
        self._num_under_way = 0
        """Bytes that the other end has not read yet."""
        self._under_way: deque[bytes | _Mark] = deque()
        """What is on its way to this end."""
        self._last_arrival = 0.0
        """When the last of it arrives."""
        self._unread: deque[bytes | _Mark] = deque()
        self._reads = self._told_to_wait = self._has_sent_end = False
        self._state: Literal["open", "closing", "over"] = "open"
        network.num_open += 1
        process.on_end[self] = self._process_ends

    def begin(self, loop: SimLoop, protocol: asyncio.Protocol) -> None:
        """Call the protocol from now on."""
        self._loop, self._protocol, self._reads = loop, protocol, True
        self._call(protocol.connection_made, self)
        if self._unread:
            loop.call_soon(self._read)

    # As a transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer.sockname, "sockname": self.sockname}.get(name, default)

    def is_closing(self) -> bool:
        return self._state != "open"

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._unsent.set_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._unsent.num_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._state == "open" and not self._has_sent_end and data:
            self._unsent.append(bytes(data))
            self._send()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._has_sent_end:
            self._has_sent_end = True
            self._send()

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._reads and self._state == "open":
            self._reads = True
            if self._unread:
                self._on_loop(self._read)

    def is_reading(self) -> bool:
        return self._reads

    def close(self) -> None:
        if self._state == "open":
            self._state, self._reads = "closing", False
            if not self._unsent.num_bytes:
                self._close()

    def abort(self) -> None:
        if not self.is_over:
            self._unsent.clear()
            self._finish(None, tell="reset")

    # Sending.

    def _send(self) -> None:
        """Pass on what the connection takes now."""
        unsent = self._unsent
        while unsent.num_bytes and self._num_under_way < WINDOW_BYTES:
            piece = unsent.take(WINDOW_BYTES - self._num_under_way)
            self._num_under_way += len(piece)
            self.peer.expect(piece)
        if unsent.num_bytes > unsent.high and not self._told_to_wait:
            self._told_to_wait = True
            self._call(self._protocol.pause_writing)
        elif unsent.num_bytes <= unsent.low and self._told_to_wait:
            self._told_to_wait = False
            self._call(self._protocol.resume_writing)
        if not unsent.num_bytes:
            if self._state == "closing":
                self._close()
            elif self._has_sent_end:
                self._send_end()

    def _send_end(self) -> None:
        if not self.is_over:
            self.peer.expect(_END)

    def _close(self) -> None:
        """End the connection, as all is sent."""
        self._has_sent_end = True
        self._finish(None, tell="reset" if self._unread and self._unread[0] not in (_END, _RESET) else "end")

    def acknowledge(self, num_bytes: int) -> None:
        """Record that the other end has read `num_bytes`."""
        self._num_under_way -= num_bytes
        if self._unsent.num_bytes and not self.is_over:
            self._on_loop(self._send)

    # Arriving.

    def expect(self, what: bytes | _Mark) -> None:
        """Record that the other end has sent something: it arrives later."""
        network = self._network
        num_bytes = 0 if what is _END or what is _RESET else len(what)
        source, target = self.peer.process.host, self.process.host
        self._under_way.append(what)
        if target.cores:
            work_s = network.work_s(num_bytes, is_of_connectors=self.is_of_connectors)
            network.core_of(target.cores, source).spend(work_s, self.arrive)
            return
        arrival = network.arrival(source, target, num_bytes, is_of_connectors=self.is_of_connectors)
        self._last_arrival = max(arrival, self._last_arrival)
        loop = network.loop if self._loop is None or not self.process.is_alive else self._loop
        loop.call_at(self._last_arrival, self.arrive, context=_NO_CONTEXT)

    def arrive(self) -> None:
        """The oldest of what is on its way is here, unless the hosts are cut off from each other."""
        network = self._network
        if network.holds(self):
            return
        what = self._under_way.popleft()
        if network.simulation.is_noting:
            about = what if what is _END or what is _RESET else f"{len(what)} {zlib.crc32(cast(bytes, what)):x}"
            network.simulation.note(f"{self.peer.process.name} > {self.process.name} {self.sockname[1]} {about}")
        if what is _RESET:
            self._unread.clear()
        if self.is_over or not self.process.is_alive:
            self._unexpected(what)
            return
        self._unread.append(what)
        if self._loop is not None and (self._reads or what is _RESET) and len(self._unread) == 1:
            if asyncio._get_running_loop() is self._loop:
                self._read()
            else:
                self._loop.call_soon(self._read)

    def _unexpected(self, what: bytes | _Mark) -> None:
        """What comes on a connection that is over is answered with a reset, if there is a machine to send one."""
        if what is not _RESET and what is not _END and self.process.host.is_up and not self.peer.is_over:
            self.peer.expect(_RESET)

    def _read(self) -> None:
        """Give what has arrived to the protocol, for as long as it reads."""
        while self._unread and not self.is_over and (self._reads or self._unread[0] is _RESET):
            what = self._unread.popleft()
            if what is _RESET:
                self._finish(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), tell=None)
            elif what is _END:
                if not self._call(self._protocol.eof_received):
                    self.close()
            else:
                self.peer.acknowledge(len(what))
                for part in self._network.parts(cast(bytes, what)):
                    if not self.is_over:
                        self._call(self._protocol.data_received, part)

    # The end.

    @property
    def is_over(self) -> bool:
        """True if this end is closed."""
        return self._state == "over"

    def _finish(self, error: Exception | None, tell: _Mark | None) -> None:
        if self.is_over:
            return
        self.break_off(tell)
        if self._loop is not None:
            self._loop.call_soon(partial(self._call, self._protocol.connection_lost, error))

    def break_off(self, tell: _Mark | None) -> None:
        """Close this end without a word to the protocol. `tell`: what the other end gets."""
        if self.is_over:
            return
        self._state, self._reads = "over", False
        self._network.num_open -= 1
        self.process.on_end.pop(self, None)
        for one in self._unread:
            if one is not _END and one is not _RESET:
                self.peer.acknowledge(len(one))
        self._unread.clear()
        if tell is not None and not self.peer.is_over:
            self.peer.expect(tell)

    def _process_ends(self) -> None:
        if self.process.host.is_up:
            self.break_off(tell=self._network.draw_end())
        else:
            self.break_off(tell=None)

    def reset(self) -> None:
        """Break the connection, as somebody on the way: both ends hear of it."""
        for one in (self, self.peer):
            one.expect(_RESET)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon(call)

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the protocol; if it raises, the connection ends, as in asyncio."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - the edge between one connection and its loop
            assert self._loop is not None
            self._loop.call_exception_handler(
                {"message": f"a protocol failed: {error!r}", "exception": error, "transport": self}
            )
            if not self.is_over:
                self._finish(error, tell="reset")
            return None


class Network:
    """All hosts, and how bytes pass between them."""

    def __init__(self, simulation: Simulation, spec: NetworkSpec) -> None:
        self.simulation, self.spec = simulation, spec
        self.hosts: dict[str, SimHost] = {}
        self.memories: dict[tuple[str, int], object] = {}
        """What can be read over the network, by the address of its owner (`sim.transfers`)."""
        self._cut: set[tuple[str, str]] = set()
        self._held: dict[SimTransport, int] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._lost: set[SimTransport] = set()
        """Ends of connections at which nothing arrives any more."""
        self.cores: Sequence[SimCore] = ()
        """All cores, if all hosts are one machine's."""
        self.num_open = 0
        """Ends of connections that are open."""
        self.connections: list[SimTransport] = []
        """The dialling ends of connections, those that are over too until they are looked at."""
        self.loop = self.host("outside").process("outside").thread("loop")

    def host(self, address: str) -> SimHost:
        """The host of this address, made when it is first named."""
        if address not in self.hosts:
            self.hosts[address] = SimHost(self, address)
        return self.hosts[address]

    # Connections.

    async def connect(
        self, loop: SimLoop, factory: Callable[[], asyncio.Protocol], address: str, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """A new connection. Raises `ConnectionRefusedError`, or `TimeoutError` if nobody answers."""
        source, target = loop.process.host, self.host(address)
        begun = loop.time()
        while True:
            await asyncio.sleep(self.arrival(source, target, 0) - loop.time())
            if target.is_up and not self.is_cut(source, target):
                break
            if loop.time() - begun > CONNECT_S:
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            await asyncio.sleep(1.0)  # as TCP repeats it
        listener = target.listeners.get(port)
        accepted = None
        if listener is not None:
            ours = SimTransport(self, loop.process, (source.address, source.free_port()))
            theirs = SimTransport(self, listener._process, (address, port))
            ours.peer, theirs.peer = theirs, ours
            accepted = AcceptedSocket(theirs)
            if not listener.reached_by(accepted):
                accepted = None
        try:
            await asyncio.sleep(self.arrival(target, source, 0) - loop.time())
        except asyncio.CancelledError:
            if accepted is not None:
                accepted.transport.peer.break_off(tell="reset")
            raise
        if accepted is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        ours, protocol = accepted.transport.peer, factory()
        self._remember(ours)
        ours.begin(loop, protocol)
        return ours, protocol

    def _remember(self, end: SimTransport) -> None:
        self.connections.append(end)
        if len(self.connections) > 64 + 2 * self.num_open:
            self.connections = self.open_connections()

    def open_connections(self) -> list[SimTransport]:
        """The dialling ends of all connections that are open."""
        return [one for one in self.connections if not one.is_over]

    # Time.

    def arrival(self, source: SimHost, target: SimHost, num_bytes: int, *, is_of_connectors: bool = False) -> float:
        """When bytes that are sent now are there. Those of one host leave one after the other, and so they arrive."""
        spec, random, now = self.spec, self.simulation.random, self.simulation.now
        latency_s = (spec.peer_s if is_of_connectors else spec.latency_s) + random.random() * spec.jitter_s
        if spec.late_share and random.random() < spec.late_share:
            latency_s += random.random() * spec.late_s
        if self._slow:
            latency_s += random.random() * self._slow.get((source.address, target.address), 0.0)
        if not num_bytes:
            return now + latency_s
        seconds = num_bytes / spec.bandwidth
        begins = max(now, source.sends_free_at)
        source.sends_free_at = begins + seconds
        ends = max(begins + latency_s, target.receives_free_at) + seconds
        target.receives_free_at = ends
        return ends

    def core_of(self, cores: Sequence[SimCore], source: SimHost) -> SimCore:
        """The core, of these, on which somebody reads what this host has sent: where the least compute. The sender, who
        may go on, counts as one if it has one core."""
        random = self.simulation.random.random
        return min(cores, key=lambda one: (one.num_computing + (source.cores == [one]), random()))

    def work_s(self, num_bytes: int, *, is_of_connectors: bool) -> float:
        """For how long a core reads so many bytes that another process of the same machine has sent."""
        spec = self.spec
        return (spec.peer_s if is_of_connectors else spec.latency_s) + num_bytes / spec.bandwidth

    def parts(self, piece: bytes) -> tuple[bytes, ...]:
        """A piece as it is read: seldom in two parts."""
        random = self.simulation.random
        if len(piece) > 1 and random.random() < self.spec.cut_share:
            place = random.randrange(1, len(piece))
            return piece[:place], piece[place:]
        return (piece,)

    def draw_end(self) -> _Mark:
        """How a process that dies leaves a connection: reset if it had unread bytes, else at its end."""
        return _RESET if self.simulation.random.random() < 0.5 else _END

    # Partitions.

    def is_cut(self, one: SimHost, other: SimHost) -> bool:
        """True if nothing arrives between these two."""
        return bool(self._cut) and (one.address, other.address) in self._cut

    def cut(self, one: SimHost, other: SimHost) -> None:
        """Let nothing arrive between these two until `heal`."""
        self.simulation.note(f"{one.address} and {other.address} are cut off from each other")
        self._cut |= {(one.address, other.address), (other.address, one.address)}

    def heal(self, one: SimHost, other: SimHost) -> None:
        """Let what was sent meanwhile arrive now."""
        self.simulation.note(f"{one.address} and {other.address} see each other again")
        self._cut -= {(one.address, other.address), (other.address, one.address)}
        held, self._held = self._held, {}
        for end, number in held.items():
            for _ in range(number):
                self.loop.call_at(self.arrival(end.peer.process.host, end.process.host, 0), end.arrive)

    def slow_down(self, one: SimHost, other: SimHost, max_s: float) -> None:
        """All between these two takes up to `max_s` longer from now on; with 0, as long as before."""
        self.simulation.note(f"between {one.address} and {other.address} all is up to {max_s:.3f} s late")
        self._slow[one.address, other.address] = self._slow[other.address, one.address] = max_s

    def lose(self, connection: SimTransport) -> None:
        """Whatever is on its way or sent on this connection from now on is lost, and neither end hears of it: as when
        something in between forgets it."""
        self.simulation.note(f"a connection of {connection.process.name} is forgotten")
        self._lost |= {connection, connection.peer}

    def holds(self, end: SimTransport) -> bool:
        """True if what would arrive at this end now has to wait."""
        source, target = end.peer.process.host, end.process.host
        if not target.is_up:
            return True  # for good
        if end in self._lost:
            return True
        if not self.is_cut(source, target):
            return False
        self._held[end] = self._held.get(end, 0) + 1
        return True
