"""A simulated network: hosts, listening sockets, TCP connections, and their faults.

Bytes arrive in order, after the latency of the link and their time at its bandwidth, in chunks that may be cut
anywhere. At most `WINDOW_BYTES` of a connection are in flight or unread at the other end: then the writer has to wait
(`pause_writing`). While two hosts are partitioned, nothing arrives; bytes in flight arrive after the repair, as TCP
retransmits them. A process that ends resets its connections; a machine that ends sends nothing.

Owns hosts, sockets and connections. `Network.loop` runs events from outside: it belongs to no machine.
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
_FIRST_PORT = 32768
_Mark = Literal["end", "reset"]
_END: Final = "end"
_RESET: Final = "reset"
_NO_CONTEXT = Context()
"""The context of events from outside."""


@dataclass(frozen=True)
class NetworkSpec:
    """One link for all pairs of hosts. Times in seconds, bandwidth in bytes per second for each host and direction.

    `peer_s`: the latency between connectors, and of reads of another instance's blocks; `late_share`: the fraction of
    chunks with up to `max_extra_latency_s` of extra latency; `cut_share`: the fraction that arrives in two parts."""

    latency_s: float = 50e-6
    peer_s: float = 50e-6
    jitter_s: float = 20e-6
    bandwidth: float = 10e9
    late_share: float = 0.0005
    max_extra_latency_s: float = 0.02
    cut_share: float = 0.02


class SimHost:
    """A machine with one address, or some cores of one."""

    def __init__(self, network: Network, address: str) -> None:
        self.network, self.address = network, address
        self.cores: Sequence[SimCore] = ()
        """The cores on which arriving bytes are read; empty: on otherwise unused ones."""
        self.listeners: dict[int, ListeningSocket] = {}
        self.is_up = True
        self.clock_s = 0.0
        """Seconds by which its wall clock is ahead."""
        self.sends_free_at = self.receives_free_at = 0.0
        self._port = _FIRST_PORT

    def process(self, name: str) -> SimProcess:
        """A new process on this host."""
        return SimProcess(self.network.simulation, self, name)

    def free_port(self) -> int:
        """A port that was never used."""
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
    """A listening socket, as far as the HTTP acceptor uses a `socket.socket`."""

    def __init__(self, host: SimHost, process: SimProcess, port: int) -> None:
        self._host, self._process, self._port = host, process, port
        self._waiting: deque[AcceptedSocket] = deque()
        self._watcher: tuple[SimLoop, Callable[..., Any], tuple[Any, ...]] | None = None
        process.on_end[self] = self.close

    def getsockname(self) -> tuple[str, int]:
        """Address and port."""
        return self._host.address, self._port

    def add_watcher(self, loop: SimLoop, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call back for each waiting connection."""
        self._watcher = loop, callback, args
        for _ in self._waiting:
            self._wake()

    def unwatch(self) -> bool:
        """Remove the watcher."""
        was_watched, self._watcher = self._watcher is not None, None
        return was_watched

    def _wake(self) -> None:
        if self._watcher is not None:
            loop, callback, args = self._watcher
            loop.call_soon(callback, *args)

    def enqueue(self, accepted: AcceptedSocket) -> bool:
        """Queue a new connection; False if the backlog is full."""
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
        """Free the port; waiting connections are reset."""
        self._process.on_end.pop(self, None)
        self._watcher = None
        if self._host.listeners.get(self._port) is self:
            del self._host.listeners[self._port]
        while self._waiting:
            self._waiting.popleft().close()


class AcceptedSocket:
    """An established connection without a protocol yet."""

    def __init__(self, transport: SimTransport) -> None:
        self.transport = transport

    def setblocking(self, flag: bool) -> None:
        """Ignored: simulated calls never block."""

    def attach(self, loop: SimLoop, protocol: asyncio.Protocol) -> SimTransport:
        """Attach a protocol, which gets all further bytes."""
        self.transport.begin(loop, protocol)
        return self.transport

    def close(self) -> None:
        """Reset it."""
        self.transport.disconnect(tell="reset")


class SendBuffer:
    """Bytes that one end of a connection has written and not sent yet."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self.num_bytes = 0
        self.set_limits(None, None)

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the high and low water marks in bytes, as in asyncio."""
        self.high = HIGH_WATER_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low

    def append(self, data: bytes) -> None:
        """Append written bytes."""
        self._chunks.append(data)
        self.num_bytes += len(data)

    def take(self, max_bytes: int) -> bytes:
        """Remove the oldest chunk, or at most `max_bytes` of it."""
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self.num_bytes -= len(chunk)
        return chunk

    def clear(self) -> None:
        """Drop all bytes."""
        self._chunks.clear()
        self.num_bytes = 0


class SimTransport(asyncio.Transport):
    """One end of a connection. Called on its own loop only, except by the other end's arrivals."""

    peer: SimTransport

    def __init__(self, network: Network, process: SimProcess, sockname: tuple[str, int]) -> None:
        super().__init__()
        self._network, self.process, self.sockname = network, process, sockname
        self.is_between_connectors = False
        """True if the connection is between two connectors."""
        self._loop: SimLoop | None = None
        self._protocol: asyncio.Protocol
        self._unsent = SendBuffer()
        self._num_in_flight = 0
        """Number of bytes that the other end has not read yet."""
        self._in_flight: deque[bytes | _Mark] = deque()
        """Bytes and marks in flight to this end."""
        self._last_arrival = 0.0
        """Arrival time of the last of them."""
        self._unread: deque[bytes | _Mark] = deque()
        self._reads = self._is_writing_paused = self._has_sent_end = False
        self._state: Literal["open", "closing", "over"] = "open"
        network.num_open += 1
        process.on_end[self] = self._process_ends

    def begin(self, loop: SimLoop, protocol: asyncio.Protocol) -> None:
        """Attach the protocol."""
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
        """Send as many bytes as the window allows."""
        unsent = self._unsent
        while unsent.num_bytes and self._num_in_flight < WINDOW_BYTES:
            chunk = unsent.take(WINDOW_BYTES - self._num_in_flight)
            self._num_in_flight += len(chunk)
            self.peer.deliver_later(chunk)
        if unsent.num_bytes > unsent.high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._call(self._protocol.pause_writing)
        elif unsent.num_bytes <= unsent.low and self._is_writing_paused:
            self._is_writing_paused = False
            self._call(self._protocol.resume_writing)
        if not unsent.num_bytes:
            if self._state == "closing":
                self._close()
            elif self._has_sent_end:
                self._send_end()

    def _send_end(self) -> None:
        if not self.is_over:
            self.peer.deliver_later(_END)

    def _close(self) -> None:
        """End the connection after all bytes are sent."""
        self._has_sent_end = True
        self._finish(None, tell="reset" if self._unread and self._unread[0] not in (_END, _RESET) else "end")

    def acknowledge(self, num_bytes: int) -> None:
        """Record that the other end has read `num_bytes`."""
        self._num_in_flight -= num_bytes
        if self._unsent.num_bytes and not self.is_over:
            self._on_loop(self._send)

    # Arriving.

    def deliver_later(self, data: bytes | _Mark) -> None:
        """Schedule the arrival of bytes or a mark from the other end."""
        network = self._network
        num_bytes = 0 if data is _END or data is _RESET else len(data)
        source, target = self.peer.process.host, self.process.host
        self._in_flight.append(data)
        if target.cores:
            work_s = network.work_s(num_bytes, is_between_connectors=self.is_between_connectors)
            network.core_of(target.cores, source).spend(work_s, self.deliver)
            return
        arrival = network.arrival(source, target, num_bytes, is_between_connectors=self.is_between_connectors)
        self._last_arrival = max(arrival, self._last_arrival)
        loop = network.loop if self._loop is None or not self.process.is_alive else self._loop
        loop.call_at(self._last_arrival, self.deliver, context=_NO_CONTEXT)

    def deliver(self) -> None:
        """Deliver the oldest bytes or mark in flight, unless the hosts are partitioned."""
        network = self._network
        if network.is_held(self):
            return
        data = self._in_flight.popleft()
        if network.simulation.is_logging:
            summary = data if data is _END or data is _RESET else f"{len(data)} {zlib.crc32(cast(bytes, data)):x}"
            network.simulation.note(f"{self.peer.process.name} > {self.process.name} {self.sockname[1]} {summary}")
        if data is _RESET:
            self._unread.clear()
        if self.is_over or not self.process.is_alive:
            self._on_unexpected(data)
            return
        self._unread.append(data)
        if self._loop is not None and (self._reads or data is _RESET) and len(self._unread) == 1:
            if asyncio._get_running_loop() is self._loop:
                self._read()
            else:
                self._loop.call_soon(self._read)

    def _on_unexpected(self, data: bytes | _Mark) -> None:
        """Answer bytes on a closed connection with a reset, if the machine is up."""
        if data is not _RESET and data is not _END and self.process.host.is_up and not self.peer.is_over:
            self.peer.deliver_later(_RESET)

    def _read(self) -> None:
        """Pass arrived bytes to the protocol while it reads."""
        while self._unread and not self.is_over and (self._reads or self._unread[0] is _RESET):
            data = self._unread.popleft()
            if data is _RESET:
                self._finish(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), tell=None)
            elif data is _END:
                if not self._call(self._protocol.eof_received):
                    self.close()
            else:
                self.peer.acknowledge(len(data))
                for part in self._network.split(cast(bytes, data)):
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
        self.disconnect(tell)
        if self._loop is not None:
            self._loop.call_soon(partial(self._call, self._protocol.connection_lost, error))

    def disconnect(self, tell: _Mark | None) -> None:
        """Close this end without notifying the protocol. `tell`: the mark that the other end gets."""
        if self.is_over:
            return
        self._state, self._reads = "over", False
        self._network.num_open -= 1
        self.process.on_end.pop(self, None)
        for chunk in self._unread:
            if chunk is not _END and chunk is not _RESET:
                self.peer.acknowledge(len(chunk))
        self._unread.clear()
        if tell is not None and not self.peer.is_over:
            self.peer.deliver_later(tell)

    def _process_ends(self) -> None:
        if self.process.host.is_up:
            self.disconnect(tell=self._network.draw_end())
        else:
            self.disconnect(tell=None)

    def reset(self) -> None:
        """Reset both ends of the connection, as a middlebox might."""
        for end in (self, self.peer):
            end.deliver_later(_RESET)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon(call)

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the protocol; if it raises, the connection ends, as in asyncio."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - the boundary between one connection and its loop
            assert self._loop is not None
            self._loop.call_exception_handler(
                {"message": f"a protocol failed: {error!r}", "exception": error, "transport": self}
            )
            if not self.is_over:
                self._finish(error, tell="reset")
            return None


class Network:
    """All hosts, and the links between them."""

    connect_s = 127.0
    """Seconds after which Linux gives up a connection attempt without an answer."""

    def __init__(self, simulation: Simulation, spec: NetworkSpec) -> None:
        self.simulation, self.spec = simulation, spec
        self.hosts: dict[str, SimHost] = {}
        self.memories: dict[tuple[str, int], object] = {}
        """Memory that can be read over the network, by the address of its owner (`sim.transfers`)."""
        self._partitioned: set[tuple[str, str]] = set()
        self._held: dict[SimTransport, int] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._lost: set[SimTransport] = set()
        """Ends of connections at which bytes are lost."""
        self.cores: Sequence[SimCore] = ()
        """All cores, if all hosts are on one machine."""
        self.num_open = 0
        """Number of open ends of connections."""
        self.connections: list[SimTransport] = []
        """The dialling ends of connections; closed ones are removed from time to time."""
        self.loop = self.host("outside").process("outside").thread("loop")

    def host(self, address: str) -> SimHost:
        """The host of this address, created at first use."""
        if address not in self.hosts:
            self.hosts[address] = SimHost(self, address)
        return self.hosts[address]

    # Connections.

    async def connect(
        self, loop: SimLoop, factory: Callable[[], asyncio.Protocol], address: str, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """A new connection. Raises `ConnectionRefusedError`, or `TimeoutError` without an answer."""
        source, target = loop.process.host, self.host(address)
        begun = loop.time()
        while True:
            await asyncio.sleep(self.arrival(source, target, 0) - loop.time())
            if target.is_up and not self.is_partitioned(source, target):
                break
            if loop.time() - begun > self.connect_s:
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            await asyncio.sleep(1.0)  # TCP retransmits
        listener = target.listeners.get(port)
        accepted = None
        if listener is not None:
            local = SimTransport(self, loop.process, (source.address, source.free_port()))
            remote = SimTransport(self, listener._process, (address, port))
            local.peer, remote.peer = remote, local
            accepted = AcceptedSocket(remote)
            if not listener.enqueue(accepted):
                accepted = None
        try:
            await asyncio.sleep(self.arrival(target, source, 0) - loop.time())
        except asyncio.CancelledError:
            if accepted is not None:
                accepted.transport.peer.disconnect(tell="reset")
            raise
        if accepted is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        local, protocol = accepted.transport.peer, factory()
        self._remember(local)
        local.begin(loop, protocol)
        return local, protocol

    def _remember(self, end: SimTransport) -> None:
        self.connections.append(end)
        if len(self.connections) > 64 + 2 * self.num_open:
            self.connections = self.open_connections()

    def open_connections(self) -> list[SimTransport]:
        """The dialling ends of all connections that are open."""
        return [connection for connection in self.connections if not connection.is_over]

    # Time.

    def arrival(
        self, source: SimHost, target: SimHost, num_bytes: int, *, is_between_connectors: bool = False
    ) -> float:
        """The arrival time of bytes that are sent now. A host sends, and receives, one chunk after the other."""
        spec, random, now = self.spec, self.simulation.random, self.simulation.now
        latency_s = (spec.peer_s if is_between_connectors else spec.latency_s) + random.random() * spec.jitter_s
        if spec.late_share and random.random() < spec.late_share:
            latency_s += random.random() * spec.max_extra_latency_s
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
        """The core on which bytes from this host are read: the one with the fewest computations. The sender, which may
        continue, counts as one if it has a single core."""
        random = self.simulation.random.random
        return min(cores, key=lambda core: (core.num_computing + (source.cores == [core]), random()))

    def work_s(self, num_bytes: int, *, is_between_connectors: bool) -> float:
        """Seconds that a core takes to read bytes from another process of the same machine."""
        spec = self.spec
        return (spec.peer_s if is_between_connectors else spec.latency_s) + num_bytes / spec.bandwidth

    def split(self, chunk: bytes) -> tuple[bytes, ...]:
        """The chunk, rarely cut into two parts."""
        random = self.simulation.random
        if len(chunk) > 1 and random.random() < self.spec.cut_share:
            cut = random.randrange(1, len(chunk))
            return chunk[:cut], chunk[cut:]
        return (chunk,)

    def draw_end(self) -> _Mark:
        """The mark that a dying process leaves on a connection, at random: a reset (unread bytes) or an end."""
        return _RESET if self.simulation.random.random() < 0.5 else _END

    # Partitions.

    def is_partitioned(self, first: SimHost, second: SimHost) -> bool:
        """True if these two hosts are partitioned."""
        return bool(self._partitioned) and (first.address, second.address) in self._partitioned

    def partition(self, first: SimHost, second: SimHost) -> None:
        """Partition two hosts until `repair`."""
        self.simulation.note(f"{first.address} and {second.address} are partitioned")
        self._partitioned |= {(first.address, second.address), (second.address, first.address)}

    def repair(self, first: SimHost, second: SimHost) -> None:
        """End the partition of two hosts; held bytes arrive now."""
        self.simulation.note(f"{first.address} and {second.address} are connected again")
        self._partitioned -= {(first.address, second.address), (second.address, first.address)}
        held, self._held = self._held, {}
        for end, number in held.items():
            for _ in range(number):
                self.loop.call_at(self.arrival(end.peer.process.host, end.process.host, 0), end.deliver)

    def slow_down(self, first: SimHost, second: SimHost, max_s: float) -> None:
        """Add a random delay of up to `max_s` between two hosts; 0 ends it."""
        self.simulation.note(f"between {first.address} and {second.address} all is up to {max_s:.3f} s late")
        self._slow[first.address, second.address] = self._slow[second.address, first.address] = max_s

    def lose(self, connection: SimTransport) -> None:
        """Lose all bytes in flight or sent later on this connection, without notifying the ends, as when a middlebox
        drops its state."""
        self.simulation.note(f"a connection of {connection.process.name} is forgotten")
        self._lost |= {connection, connection.peer}

    def is_held(self, end: SimTransport) -> bool:
        """True if bytes cannot arrive at this end now; they are held."""
        source, target = end.peer.process.host, end.process.host
        if not target.is_up:
            return True  # for good
        if end in self._lost:
            return True
        if not self.is_partitioned(source, target):
            return False
        self._held[end] = self._held.get(end, 0) + 1
        return True
