"""Forwards the body of an instance's answer to a client: `relay(call, response, reader)`.

A router forwards a chunk for each token. Chunks that match the reader's `Pattern` go from one socket to the other in
compiled code, which later passes their captured parts to the reader. All other bytes are parsed, and written by the
response. So is everything without a C++ compiler, or with TLS.

While compiled code reads a stream, the transports of both sockets are idle: the instance's is paused, and the client's
has nothing to write. Before each step both are checked for closing, as the descriptor of a closed socket may be reused.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from kvferry.core.compiled import NotCompiled, compiled
from kvferry.core.errors import ProtocolError, TransferError
from kvferry.core.runtime.threads import Thread
from kvferry.http.client.call import Call
from kvferry.http.client.connection import ClientConnection
from kvferry.http.server.response import Response

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("relay.cpp")
_FLAGS = ("-std=c++17", "-O2")


class Pattern(NamedTuple):
    """Chunks that may be forwarded without `Reader.take`: their payload begins with `prefix` and contains none of
    `stops`.

    `keep`: the part that is captured for `Reader.on_forwarded`. "nothing"; "first line": captured and not forwarded,
    and only this line is searched for `stops`; "all": captured and forwarded. If a part is captured, the payload must
    be exactly one server-sent event.
    """

    prefix: bytes = b""
    keep: Literal["nothing", "first line", "all"] = "nothing"
    stops: tuple[bytes, ...] = ()


class Reader(Protocol):
    """Transforms a body for the client."""

    def take(self, payload: bytes) -> bytes:
        """Transform the next bytes of the body. Raises `TransferError`, which ends the call."""

    def pattern(self) -> Pattern | None:
        """The chunks that may be forwarded without `take`; None: none. Called after each `take`."""

    def on_forwarded(self, captured: bytes) -> None:
        """Called before the next `take` with the captured parts of the chunks that were forwarded without `take`."""


async def relay(call: Call, response: Response, reader: Reader) -> None:
    """Write the body of a call, transformed by `reader`, to a response that has begun. Reads no faster than the client
    does. The response stays open: call its `end`, or relay another call. Raises the error that ended the call early."""

    def write(payload: bytes) -> None:
        response.write(reader.take(payload))

    if buffered := call.take():
        try:
            write(buffered)
        except TransferError as error:
            call.fail(error)
            raise
    if call.state == "complete":
        return
    stream = None
    call.set_sink(write)
    response.writer.set_producer(call)
    try:
        if isinstance(call.relays, StreamForwarder):
            stream = call.relays.add(call, response, reader)
        while not call.is_over:
            await call.changed()
    finally:
        call.set_sink(None)
        if stream is not None:
            stream.stop()
        response.writer.set_producer(None)
    if call.error is not None:
        raise call.error


# In compiled code; relay.cpp has the same structures.

_KEPT_BYTES = 16 * 1024
_KEEP = {"nothing": 0, "first line": 1, "all": 2}


class _Pattern(ctypes.Structure):
    _fields_ = (
        ("prefix", ctypes.c_char_p),
        ("stops", ctypes.POINTER(ctypes.c_char_p)),
        ("num_stops", ctypes.c_int32),
        ("keep", ctypes.c_int32),
    )


class _StreamState(ctypes.Structure):
    _fields_ = (
        ("pattern", ctypes.POINTER(_Pattern)),
        ("source", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("received", ctypes.c_uint64),
        ("sent", ctypes.c_uint64),
        ("unsent", ctypes.c_void_p),
        ("unsent_bytes", ctypes.c_int64),
        ("unread", ctypes.c_void_p),
        ("unread_bytes", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
        ("ended", ctypes.c_int32),
        ("last", ctypes.c_char * 4),
        ("kept", ctypes.c_char * _KEPT_BYTES),
    )


@cache
def library() -> ctypes.PyDLL | None:
    """The compiled code; None without a compiler. The first call may compile for a second."""
    try:
        compiled_library = ctypes.PyDLL(str(compiled([_SOURCE], _FLAGS)))
        compiled_library.relay_step.argtypes = [ctypes.c_void_p]
    except (NotCompiled, OSError, AttributeError) as error:  # AttributeError: another library, or a damaged one
        if str(error):
            logger.warning("streams are passed on by Python, which takes 1.5 times the processor time: %s", error)
        return None
    return compiled_library


def _compile_in_background() -> asyncio.Future[ctypes.PyDLL | None]:
    """Call `library` on a thread that is not joined at exit, because it may wait for another process's compiler."""
    future: asyncio.Future[ctypes.PyDLL | None] = asyncio.get_running_loop().create_future()

    def find() -> None:
        result = library()
        with suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

    Thread(find, name="compiles the relay").start()
    return future


class StreamForwarder:
    """The streams of an event loop that compiled code forwards. An asynchronous context manager. The code is compiled
    in the background if necessary; until then, Python forwards the streams."""

    def __init__(self) -> None:
        self.step: Any = None
        self._epoll: select.epoll | None = None
        self._opening: asyncio.Task[None] | None = None
        self._streams: dict[int, _Stream] = {}
        """Streams by the descriptor of the source."""
        self._patterns: dict[Pattern, _Pattern] = {}

    async def __aenter__(self) -> Self:
        self._opening = asyncio.create_task(self._open_with(_compile_in_background()))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self.close()

    async def opened(self) -> None:
        """Wait until the compiled code is loaded, or it is known that there is none."""
        if self._opening is not None:
            await self._opening

    async def _open_with(self, future: asyncio.Future[ctypes.PyDLL | None]) -> None:
        self.open(await future)

    def open(self, library: ctypes.PyDLL | None) -> None:
        """Accept streams from now on. None: there is no library, and no stream is accepted."""
        if library is None:
            return
        try:
            self._epoll = select.epoll()
        except OSError as error:
            logger.warning("streams are passed on by Python, which takes 1.5 times the processor time: %s", error)
            return
        self.step = library.relay_step
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._run)

    def close(self) -> None:
        """Close the relay; its streams are read in Python again."""
        if self._epoll is None:
            return
        for stream in tuple(self._streams.values()):
            stream.stop()
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._epoll = None

    @property
    def num_streams(self) -> int:
        """Number of streams."""
        return len(self._streams)

    def add(self, call: Call, response: Response, reader: Reader) -> _Stream | None:
        """From now on, forward the chunks of `call` that match the reader's pattern, until the stream is stopped. None:
        this is not possible, for example because one side is not chunked, or the answer is translated."""
        connection = call.connection
        if (
            self._epoll is None
            or connection is None
            or connection.transport is None
            or call.paused
            or response.is_translated
            or not call.head.chunked
        ):
            return None
        target = response.writer.transport
        source_fd, target_fd = _plain_fd(connection.transport), _plain_fd(target)
        if min(source_fd, target_fd) < 0 or response.framing != "chunked" or response.ended:
            return None
        stream = _Stream(
            self, _StreamState(source=source_fd, target=target_fd), connection, call, target, response, reader
        )
        return stream if stream.start() else None

    def watch(self, stream: _Stream, fd: int) -> bool:
        """Read from this descriptor for a stream. False: the descriptor cannot be watched."""
        assert self._epoll is not None
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            return False
        self._streams[fd] = stream
        return True

    def unwatch(self, stream: _Stream, fd: int) -> None:
        """Stop reading from this descriptor."""
        if self._streams.get(fd) is stream:
            del self._streams[fd]
            with suppress(OSError):  # it is closed already
                assert self._epoll is not None
                self._epoll.unregister(fd)

    def _run(self) -> None:
        """Read each stream that has become readable once. A stream is read once in each turn of the event loop, so that
        a stream that never pauses does not block the loop."""
        assert self._epoll is not None
        for fd, _ in self._epoll.poll(0):
            if (stream := self._streams.get(fd)) is not None:
                stream.readable()

    def compiled_pattern(self, pattern: Pattern) -> _Pattern:
        """The pattern in the library's form."""
        compiled_pattern = self._patterns.get(pattern)
        if compiled_pattern is None:
            stops = (ctypes.c_char_p * len(pattern.stops))(*pattern.stops)
            compiled_pattern = _Pattern(pattern.prefix, stops, len(pattern.stops), _KEEP[pattern.keep])
            self._patterns[pattern] = compiled_pattern
        return compiled_pattern


class _Stream:
    """One forwarded stream. It reads the instance's bytes for its call, while the transport of the call is paused."""

    def __init__(
        self,
        relays: StreamForwarder,
        state: _StreamState,
        connection: ClientConnection,
        call: Call,
        target: asyncio.Transport,
        response: Response,
        reader: Reader,
    ) -> None:
        assert connection.transport is not None
        self._relays, self._state, self._address = relays, state, ctypes.addressof(state)
        self._connection, self._source, self._target = connection, connection.transport, target
        self._call, self._response, self._reader = call, response, reader
        self._stopped = False

    def start(self) -> bool:
        """Begin to forward. False: this is not possible."""
        if not self._relays.watch(self, self._state.source):
            return False
        self._source.pause_reading()
        self._call.set_bypass(self)
        self._set_pattern_soon()
        return True

    def pause_reading(self) -> None:
        """Stop reading, so that the instance has to wait."""
        self._relays.unwatch(self, self._state.source)

    def resume_reading(self) -> None:
        """Continue reading."""
        if not self._relays.watch(self, self._state.source):
            self.stop()

    @property
    def num_received(self) -> int:
        """Number of received bytes that the call has not counted yet."""
        return int(self._state.received)

    def _set_pattern_soon(self) -> None:
        """Set the pattern for unread chunks, once all earlier output is in the client's socket."""
        asyncio.get_running_loop().call_soon(self._set_pattern)

    def _set_pattern(self) -> None:
        if self._stopped or self._response.num_unsent or not self._connection.between_chunks:
            return
        pattern = self._reader.pattern()
        if pattern is not None:
            self._state.pattern = ctypes.pointer(self._relays.compiled_pattern(pattern))

    def readable(self) -> None:
        """Called when bytes have arrived."""
        if self._source.is_closing() or self._target.is_closing():
            self.stop()
        elif self._relays.step(self._address):
            self._handle_rest()

    def _handle_rest(self) -> None:
        """Handle the bytes that the compiled code did not forward."""
        state = self._state
        unsent = ctypes.string_at(state.unsent, state.unsent_bytes) if state.unsent_bytes else b""
        unread = ctypes.string_at(state.unread, state.unread_bytes) if state.unread_bytes else b""
        captured = self._sync()
        if unsent:
            self._response.writer.write(unsent)
        self._report_captured(captured)
        if unread and not self._stopped:
            try:
                self._connection.data_received(unread)
            except Exception as error:
                logger.exception("a stream cannot be read")
                self._fail(error)
        if state.ended:
            self.stop()
        elif not self._stopped:
            self._set_pattern_soon()

    def _sync(self) -> bytes:
        """Add the forwarded bytes to the counts of the call and the response. Returns the captured bytes."""
        state = self._state
        if not state.received:
            return b""
        self._call.num_received += state.received
        self._response.forwarded(state.sent, ctypes.string_at(self._address + _StreamState.last.offset, 4))
        captured = ctypes.string_at(self._address + _StreamState.kept.offset, state.kept_bytes)
        state.received = state.sent = state.kept_bytes = 0
        return captured

    def _report_captured(self, captured: bytes) -> None:
        try:
            if captured:
                self._reader.on_forwarded(captured)
        except Exception as error:
            logger.exception("a stream cannot be read")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close the connection, as a transport does after an error. An error in reading a stream ends only this
        stream."""
        self._connection.close(ProtocolError(f"a stream cannot be read: {error}"))

    def stop(self) -> None:
        """Stop forwarding, and let the transport read again. May be called repeatedly. Never raises, because callers
        close sockets next."""
        if self._stopped:
            return
        self._stopped = True
        captured = self._sync()
        self._relays.unwatch(self, self._state.source)
        self._call.set_bypass(None)
        self._report_captured(captured)
        if not (self._call.paused or self._source.is_closing()):
            self._source.resume_reading()


def _plain_fd(transport: asyncio.Transport) -> int:
    """The descriptor of an open transport's socket; -1 if there is none, or with TLS."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
