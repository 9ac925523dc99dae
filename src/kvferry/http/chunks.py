"""Chunked transfer coding, parsed only as far as needed to find where a message ends while its bytes are forwarded."""

from __future__ import annotations

from kvferry.core.errors import ProtocolError

_LONGEST_LINE = 1024
_LONGEST_TRAILER = 65536
_LONGEST_SIZE = 15
_HEX = frozenset(b"0123456789abcdefABCDEF")


class ChunkScanner:
    """Is fed the bytes of one chunked body in order; knows where the body ends and whether the bytes so far end within
    a chunk.

    Chunk sizes are read strictly and extensions are skipped, so that no other parser can read the stream differently.
    """

    __slots__ = ("_line", "_remaining", "_trailer_bytes", "done")

    def __init__(self) -> None:
        self._remaining = 0  # bytes of the present chunk to come, with the line end behind it
        self._line = b""  # of a size or trailer line that is not complete
        self._trailer_bytes = -1  # -1 until the last chunk has been seen
        self.done = False

    @property
    def mid_chunk(self) -> bool:
        """Whether the bytes so far end within a chunk or a line."""
        return bool(self._remaining or self._line or self._trailer_bytes >= 0)

    def scan(self, data: bytes) -> int:
        """Read on. Returns the position after the end of the body if `data` contains it (`done` is then true),
        otherwise -1. Raises `ProtocolError`."""
        place, length = 0, len(data)
        while True:
            if self._remaining:
                place += self._remaining
                if place > length:
                    self._remaining = place - length
                    return -1
                if data[place - 1] != 10:
                    raise ProtocolError("a chunk is not followed by the end of its line")
                self._remaining = 0
            if place >= length:
                return -1
            end = data.find(b"\r\n", place)
            if end < 0 and not self._line.endswith(b"\r"):
                self._keep(data[place:])
                return -1
            if self._line:
                line, end = self._join(data, place)
                if end < 0:
                    return -1
            else:
                line, end = data[place:end], end + 2
            place = end
            if self._trailer_bytes >= 0:
                if not line:
                    self.done = True
                    return place
                self._count_trailer(line)
            else:
                self._open_chunk(line)

    def _join(self, data: bytes, place: int) -> tuple[bytes, int]:
        """A line that began in earlier bytes, and the position after it in `data`; -1 if it is still not complete."""
        joined = self._line + data[place:]
        end = joined.find(b"\r\n")
        if end < 0:
            self._line = b""
            self._keep(joined)
            return b"", -1
        place += end + 2 - len(self._line)
        self._line = b""
        return joined[:end], place

    def _keep(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > _LONGEST_LINE:
            raise ProtocolError("the line of a chunk's size is too long")

    def _open_chunk(self, line: bytes) -> None:
        digits = line.partition(b";")[0] if b";" in line else line
        if not digits or len(digits) > _LONGEST_SIZE or not _HEX.issuperset(digits):
            raise ProtocolError(f"{digits[:20]!r} is not the size of a chunk")
        size = int(digits, 16)
        if size:
            self._remaining = size + 2
        else:
            self._trailer_bytes = 0

    def _count_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _LONGEST_TRAILER:
            raise ProtocolError("the trailers are too long")


def only_chunk(data: bytes) -> bytes:
    """The payload of `data` if that is exactly one chunk, its size as nearly all write it (lower case, no zeros before
    it, no extension); otherwise empty."""
    end = data.find(b"\r\n", 0, _LONGEST_SIZE + 2)
    if data.endswith(b"\r\n") and data.startswith(b"%x\r\n" % (len(data) - end - 4)):
        return data[end + 2 : -2]
    return b""


def unchunked(framed: bytes) -> bytes:
    """The payload of whole chunks, or of the beginning of a chunked body."""
    payload, place = bytearray(), 0
    while (end := framed.find(b"\r\n", place)) >= 0:
        size = int(framed[place:end].partition(b";")[0], 16)
        if size == 0:
            break
        payload += framed[end + 2 : end + 2 + size]
        place = end + 2 + size + 2
    return bytes(payload)
