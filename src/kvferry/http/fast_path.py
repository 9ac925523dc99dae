"""Forwards streamed answers in compiled code, as long as nobody has to read what comes.

A router forwards a chunk for each token. Whoever reads a stream says by a `Pattern` which chunks may go on without
being looked at, and is told later what was kept of them; each other chunk, and whatever is not exactly a chunk, comes
as if there were no fast path. Needs a C++ compiler once, and sockets without TLS; otherwise all is read in Python.

While a stream is on the fast path, its two sockets belong to event loop transports that are idle: the instance's is
paused, and the client's has nothing to write. A stream is taken off before either transport closes its socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvferry.core.compiled import NotCompiled, compiled
from kvferry.core.errors import ProtocolError

if TYPE_CHECKING:
    from kvferry.http.call import Call, Reader
    from kvferry.http.client_connection import ClientConnection
    from kvferry.http.response import Response

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("fast_path.cpp")
_FLAGS = ("-std=c++17", "-O2")


class Pattern(NamedTuple):
    """Which chunks may be forwarded unread: those whose payload begins with `prefix` and contains none of `stops`.

    `keep`: what is kept of them. "first line": that line is not forwarded, and alone is searched for `stops`. If
    anything is kept, the payload must be one server-sent event, with nothing before or after it.
    """

    prefix: bytes = b""
    keep: Literal["nothing", "first line", "all"] = "nothing"
    stops: tuple[bytes, ...] = ()


def plain_fd(transport: asyncio.Transport) -> int:
    """The descriptor of an open transport's socket; -1 if there is none, or with TLS."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


_KEEP = {"nothing": 0, "first line": 1, "all": 2}


class _Counters(ctypes.Structure):
    _fields_ = (("received", ctypes.c_uint64), ("sent", ctypes.c_uint64), ("last", ctypes.c_char * 4))


class _Event(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_int64),
        ("unsent", ctypes.c_void_p),
        ("unsent_bytes", ctypes.c_int64),
        ("unread", ctypes.c_void_p),
        ("unread_bytes", ctypes.c_int64),
        ("kept_much", ctypes.c_int32),
        ("ended", ctypes.c_int32),
    )


@cache
def library() -> ctypes.PyDLL | None:
    """The compiled code; None without a compiler. The first call may compile for a second."""
    try:
        found = ctypes.PyDLL(str(compiled([_SOURCE], _FLAGS)))
    except (NotCompiled, OSError) as error:
        if str(error):
            _warn(error)
        return None
    path, stream, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    text, pointer = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_void_p)
    functions: tuple[tuple[str, Any, list[Any]], ...] = (
        ("open", path, []),
        ("fd", number, [path]),
        ("close", None, [path]),
        ("pattern", ctypes.c_void_p, [path, ctypes.c_char_p, number, text, number]),
        ("add", stream, [path, number, number, pointer]),
        ("watch", number, [path, stream, number]),
        ("quick", None, [path, stream, ctypes.c_void_p]),
        ("kept", stream, [path, stream, pointer]),
        ("remove", None, [path, stream]),
        ("run", number, [path, ctypes.POINTER(_Event)]),
    )
    try:
        for name, result, arguments in functions:
            function = found[f"fast_path_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(found, f"fast_path_{name}", function)
    except AttributeError as error:  # it is another library, or a damaged one
        _warn(error)
        return None
    return found


def _warn(error: object) -> None:
    log.warning("streams are forwarded by Python, which takes half as much processor time again: %s", error)


class FastPath:
    """All streams of one event loop that are forwarded so. `open` it, and `close` it when none is left."""

    def __init__(self) -> None:
        self._library: ctypes.PyDLL | None = None
        self._path: int | None = None
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, FastStream] = {}
        self._patterns: dict[Pattern, int] = {}
        self._event = _Event()

    def open(self, library: ctypes.PyDLL | None) -> None:
        """Forward streams from now on."""
        if library is None:
            return
        self._library, self._path = library, library.fast_path_open()
        if self._path is None:
            _warn("this process may open no more files")
            return
        self._loop.add_reader(library.fast_path_fd(self._path), self._run)

    def close(self) -> None:
        """End it; streams are read in Python again."""
        if self._path is None or self._library is None:
            return
        for stream in tuple(self._streams.values()):
            stream.stop()
        self._loop.remove_reader(self._library.fast_path_fd(self._path))
        self._library.fast_path_close(self._path)
        self._path = None

    @property
    def num_streams(self) -> int:
        """How many streams are on it."""
        return len(self._streams)

    def forward(self, connection: ClientConnection, call: Call, response: Response, reader: Reader) -> None:
        """Forward what `connection` receives from now on for `call` to `response`, both in chunks, wherever `reader`
        does not want to see it; until the stream is stopped. Does nothing if this cannot be done."""
        if connection.transport is None or call.paused:
            return
        source, target = plain_fd(connection.transport), response.plain_fd()
        if self._path is None or self._library is None or min(source, target) < 0:
            return
        counters = ctypes.c_void_p()
        name = self._library.fast_path_add(self._path, source, target, ctypes.byref(counters))
        if name < 0 or counters.value is None:
            return
        stream = FastStream(self, name, _Counters.from_address(counters.value), connection, call, response, reader)
        self._streams[name] = stream
        call.take_over(stream)
        response.take_over(stream)
        self.soon(stream)

    def _run(self) -> None:
        """Something has come on some streams."""
        assert self._library is not None
        event = self._event
        while self._path is not None and self._library.fast_path_run(self._path, event):
            stream = self._streams[event.stream]
            unsent = ctypes.string_at(event.unsent, event.unsent_bytes) if event.unsent_bytes else b""
            unread = ctypes.string_at(event.unread, event.unread_bytes) if event.unread_bytes else b""
            stream.heed(unsent, unread, ended=bool(event.ended))

    # For the streams.

    def soon(self, stream: FastStream) -> None:
        """Look whether the stream can be forwarded unread, once what was written before is in the client's socket."""
        self._loop.call_soon(stream.hasten)

    def watch(self, name: int, *, on: bool) -> bool:
        """Read from the instance, or let it wait; returns whether it is read from."""
        return self._library is not None and bool(self._library.fast_path_watch(self._path, name, on))

    def quick(self, name: int, pattern: Pattern | None) -> None:
        """Forward chunks of this pattern unread, up to the first other one."""
        if self._library is None:
            return
        address = self._patterns.get(pattern) if pattern is not None else None
        if address is None and pattern is not None:
            stops = (ctypes.c_char_p * len(pattern.stops))(*pattern.stops)
            address = self._library.fast_path_pattern(
                self._path, pattern.prefix, _KEEP[pattern.keep], stops, len(pattern.stops)
            )
            self._patterns[pattern] = address
        self._library.fast_path_quick(self._path, name, address)

    def kept(self, name: int) -> bytes:
        """What was kept of a stream since this was asked last."""
        place = ctypes.c_void_p()
        num = 0 if self._library is None else self._library.fast_path_kept(self._path, name, ctypes.byref(place))
        return ctypes.string_at(place, num) if num else b""

    def remove(self, name: int) -> None:
        """The stream is no longer on it."""
        del self._streams[name]
        if self._library is not None:
            self._library.fast_path_remove(self._path, name)


class FastStream:
    """One stream on it; the instance's connection uses it in place of the paused transport."""

    __slots__ = ("_call", "_connection", "_counters", "_name", "_path", "_reader", "_response", "_stopped", "_synced")

    def __init__(
        self,
        path: FastPath,
        name: int,
        counters: _Counters,
        connection: ClientConnection,
        call: Call,
        response: Response,
        reader: Reader,
    ) -> None:
        self._path, self._name, self._counters = path, name, counters
        self._connection, self._call, self._response, self._reader = connection, call, response, reader
        self._stopped = False
        self._synced = (0, 0)
        """What was received and sent when that was last noted."""
        assert connection.transport is not None
        connection.transport.pause_reading()

    def pause_reading(self) -> None:
        """Let the instance wait."""
        self._path.watch(self._name, on=False)

    def resume_reading(self) -> None:
        """Read on; if the kernel has no memory for that, in Python."""
        if not self._path.watch(self._name, on=True):
            self.stop()

    @property
    def num_received(self) -> int:
        """Bytes that have come and that the connection has not counted yet."""
        return int(self._counters.received) - self._synced[0]

    def hasten(self) -> None:
        """Forward what need not be read, if that is possible now: the pieces before are in the client's socket."""
        if self._stopped or self._response.num_unsent:
            return
        self._path.quick(self._name, self._reader.pattern() if self._connection.between_chunks else None)

    def heed(self, unsent: bytes, unread: bytes, *, ended: bool) -> None:
        """What is not forwarded there. `unsent` comes before `unread`."""
        kept = self._sync()
        if unsent:
            self._response.transmit_rest(unsent)
        self._pass(kept)
        if unread and not self._stopped:
            self._read(unread)
        if ended:
            self.stop()
        elif not self._stopped:
            self._path.soon(self)

    def _read(self, unread: bytes) -> None:
        try:
            self._connection.data_received(unread)
        except Exception as error:
            log.exception("a stream cannot be read")
            self._fail(error)

    def _sync(self) -> bytes:
        """Note what was forwarded; what was kept of it."""
        received, sent = int(self._counters.received), int(self._counters.sent)
        before = self._synced
        if received == before[0]:
            return b""
        self._synced = received, sent
        self._call.num_received += received - before[0]
        self._response.forwarded(sent - before[1], bytes(self._counters)[16:20])
        return self._path.kept(self._name)

    def _pass(self, kept: bytes) -> None:
        try:
            if kept:
                self._reader.passed(kept)
        except Exception as error:
            log.exception("a stream cannot be read")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """As a transport does it: a fault in reading one stream ends that stream, and nothing else."""
        self._connection.close(ProtocolError(f"a stream cannot be read: {error}"))

    def stop(self) -> None:
        """Take the stream off; the transport reads again. May be called repeatedly, and raises nothing: a socket may be
        closed after it."""
        if self._stopped:
            return
        self._stopped = True
        kept = self._sync()
        self._path.remove(self._name)
        self._response.take_over(None)
        self._call.take_over(None)
        self._pass(kept)
        transport = self._connection.transport
        if transport is not None and not (self._call.paused or transport.is_closing()):
            transport.resume_reading()
