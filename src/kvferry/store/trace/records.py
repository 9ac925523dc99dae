"""Recorded requests, read one at a time: JSON lines in the format that Mooncake publishes.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`hash_ids` names the blocks of the prompt, each together with all blocks before it; `timestamp` is in milliseconds.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import require_file

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: when it arrived (ms), the tokens of its prompt and answer, and the blocks of its prompt."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    @property
    def arrived_s(self) -> float:
        """Arrival time in seconds."""
        return self.timestamp / 1000


def read_trace(
    path: Path, on_read: Callable[[int], None] = lambda _: None, max_line_bytes: int = 16 << 20
) -> Iterator[TraceRequest]:
    """The requests of a file, in its order, one in memory at a time. `on_read`: called with the number of bytes of each
    line. Raises `ConfigError`, which names the line, for a line that is not a request, has more than `max_line_bytes`
    (a prompt of 100 million tokens), or is older than the line before it.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    last = 0.0
    for number, line in enumerate(_lines(path, max_line_bytes), start=1):
        on_read(len(line))
        if line.isspace():
            continue
        if len(line) > max_line_bytes:
            raise ConfigError(f"{path}, line {number}: longer than {max_line_bytes} bytes, so this is no trace")
        try:
            request = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if number == 1 and line.lstrip().startswith(b"["):
                raise ConfigError(
                    f"{path}, line {number}: a JSON array, instead of one object in each line; write it as lines with"
                    f" jq -c '.[]' {path}"
                ) from error
            raise ConfigError(f"{path}, line {number}: {error}; each line must be {_EXAMPLE}") from error
        if request.timestamp < last:
            raise ConfigError(
                f"{path}, line {number}: timestamp {request.timestamp:g} comes after {last:g}; sort by it"
            )
        last = request.timestamp
        yield request


_EXAMPLE = '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}'


def _lines(path: Path, max_line_bytes: int) -> Iterator[bytes]:
    """The lines of the file. Lines that are too long are cut off."""
    try:
        require_file(path)
    except ConfigError as error:
        raise ConfigError(f"cannot read the trace {error}") from error
    try:
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            while line := file.readline(max_line_bytes + 1):
                yield line
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error


def write_trace(path: Path, requests: Iterator[TraceRequest]) -> None:
    """Write requests in the format that `read_trace` reads."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")
