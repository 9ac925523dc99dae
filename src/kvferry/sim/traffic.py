"""Recorded traffic: arrival times of requests, and the lengths of their prompts and answers.

Two formats are read, distinguished by the beginning of the file: JSON lines as Mooncake publishes them
(`store.trace.records`), and CSV as Azure does:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10            the traces of 2023
    2024-05-10 00:00:00.009930+00:00,2162,5        the traces of 2024

Traces hold no text. The tokens of a prompt are derived from a seed and from its block ids, if the trace has them, so
that prompts share their prefixes as in the recording.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import unknown_key
from kvferry.sim.kv import mixed, mixed_tokens
from kvferry.store.trace.records import read_trace

BLOCK_TOKENS = 512
"""Tokens of a block in traces of Mooncake's format."""
MAX_PAUSE_S = 86_400.0
"""Max seconds without a request."""
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_TOKENS = 2**31
_MAX_LINE = _BEGIN = 4096


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: seconds since the first one, tokens of its prompt and of its answer. `block_ids` names the
    blocks of its prompt; empty: it shares nothing with others."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    block_ids: tuple[int, ...] = ()


def read_traffic(path: Path) -> list[Arrival]:
    """The requests of a trace. Raises `ConfigError` that names the file, the line and the problem."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"cannot read the trace {path}: it must be a file, as it is read twice")
    try:
        with path.open("rb") as file:
            begin = file.read(_BEGIN)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error
    is_json = begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"["))
    arrivals = _mooncake(path) if is_json else _azure(path)
    first = next(arrivals, None)
    if first is None:
        raise ConfigError(f"the trace {path} has no request")
    return [
        replace(arrival, at_s=arrival.at_s - first.at_s) for arrival in chain((first,), arrivals)
    ]  # there may be millions


def part_of(arrivals: Sequence[Arrival], *, from_s: float = 0.0, until_s: float | None = None) -> list[Arrival]:
    """Requests that arrive in `[from_s, until_s)`, at times since `from_s`. Raises `ConfigError` if there are none."""
    if arrivals and not from_s and until_s is None:
        return list(arrivals)
    end_s = float("inf") if until_s is None else until_s
    selected = [replace(arrival, at_s=arrival.at_s - from_s) for arrival in arrivals if from_s <= arrival.at_s < end_s]
    if not selected:
        part = f"from {from_s:.15g} s on" if until_s is None else f"between {from_s:.15g} s and {until_s:.15g} s"
        raise ConfigError(f"the trace has no request {part}; the last one is at {arrivals[-1].at_s:.15g} s")
    return selected


def faster(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests at `factor` times their rate."""
    return list(arrivals) if factor == 1 else [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]


def require_short_pauses(arrivals: Sequence[Arrival], max_pause_s: float = MAX_PAUSE_S) -> None:
    """Raise `ConfigError` for requests that are further apart than `max_pause_s`. A fleet without requests still
    reconciles, so that a simulated year takes hours."""
    before_s = 0.0
    for number, arrival in enumerate(arrivals, start=1):
        if arrival.at_s - before_s > max_pause_s:
            raise ConfigError(
                f"request {number} arrives {arrival.at_s - before_s:.15g} s after what is before it, and at most"
                f" {max_pause_s:g} s without a request are simulated; use a part of the trace (--from-s, --for-s) or"
                " --speed, or correct the times in it (timestamp is in milliseconds)"
            )
        before_s = arrival.at_s


def _mooncake(path: Path) -> Iterator[Arrival]:
    for number, record in enumerate(read_trace(path), start=1):
        where = f"{path}, request {number}"
        blocks = -(-record.input_length // BLOCK_TOKENS)
        if len(record.hash_ids) != blocks:
            raise ConfigError(
                f"{where}: {len(record.hash_ids)} hash_ids for {record.input_length} tokens, which are {blocks} blocks"
                f" of {BLOCK_TOKENS}"
            )
        yield _arrival(where, record.arrived_s, record.input_length, record.output_length, tuple(record.hash_ids))


def _azure(path: Path) -> Iterator[Arrival]:
    last = float("-inf")
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        if number == 1:
            _require_columns(where, row)
            continue
        if len(row) != len(COLUMNS):
            raise ConfigError(f"{where}: {len(row)} columns instead of {', '.join(COLUMNS)}")
        at_s = _time(where, row[0])
        if at_s < last:
            raise ConfigError(f"{where}: {row[0]} is before the line above; sort the trace by time")
        last = at_s
        yield _arrival(where, at_s, _tokens(where, COLUMNS[1], row[1]), _tokens(where, COLUMNS[2], row[2]))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, with their line numbers."""

    def lines() -> Iterator[str]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(_MAX_LINE):
                yield line

    try:
        reader = csv.reader(lines(), strict=True)
        yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError as error:
        problem = "it is no text in UTF-8; a compressed one has to be decompressed"
        raise ConfigError(f"cannot read the trace {path}: {problem}") from error
    except (OSError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _require_columns(where: str, row: list[str]) -> None:
    for name, expected in zip(row, COLUMNS, strict=False):
        if name.strip() != expected:
            unknown = unknown_key(f"{where}: {name[:40]!r}", name, COLUMNS, "column")
            raise ConfigError(f"{unknown}; the columns are in this order")
    if len(row) != len(COLUMNS):
        raise ConfigError(f"{where}: a trace begins with {{ (JSON lines) or with the columns {','.join(COLUMNS)}")


def _time(where: str, text: str) -> float:
    """Seconds since the epoch. Azure writes seven digits after the point, or six and +00:00; six are read."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {text[:40]!r} is not a time such as 2023-11-16 18:17:03.9799600") from error


def _tokens(where: str, column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {column} is {text[:40]!r}, not a number of tokens") from error


def _arrival(where: str, at_s: float, prompt: int, answer: int, blocks: tuple[int, ...] = ()) -> Arrival:
    if not 1 <= prompt <= _MAX_TOKENS:
        raise ConfigError(f"{where}: a prompt of {prompt} tokens; it must have 1 to {_MAX_TOKENS}")
    if not 0 <= answer <= _MAX_TOKENS:
        raise ConfigError(f"{where}: an answer of {answer} tokens; it must have 0 to {_MAX_TOKENS}")
    return Arrival(at_s, prompt, max(1, answer), blocks)


class TracePrompt(Sequence[int]):
    """The tokens of a trace's prompt, computed when they are read: a trace of a day would not fit into memory.

    `number`: the request's number, from which its tokens are derived if the trace names no blocks.
    """

    __slots__ = ("_arrival", "_number", "_seed", "_vocab_size")

    def __init__(self, arrival: Arrival, number: int, seed: int, vocab_size: int) -> None:
        self._arrival, self._number, self._seed, self._vocab_size = arrival, number, seed, vocab_size

    def __len__(self) -> int:
        return self._arrival.prompt_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            return self._tokens(first, last)[::step] if step > 0 else list(self)[index]
        return self._tokens(range(len(self))[index], range(len(self))[index] + 1)[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens(0, len(self)))

    def _tokens(self, first: int, last: int) -> list[int]:
        positions = np.arange(first, last, dtype=np.uint64)
        ids = self._arrival.block_ids
        if ids:
            names = [mixed(self._seed ^ mixed(2 * block_id % 2**64)) for block_id in ids]
            mixed_numbers = mixed_tokens(
                np.array(names, dtype=np.uint64)[positions // BLOCK_TOKENS] ^ positions % BLOCK_TOKENS
            )
        else:
            mixed_numbers = mixed_tokens(np.uint64(mixed(self._seed ^ mixed(2 * self._number + 1))) ^ positions)
        tokens: list[int] = (mixed_numbers % np.uint64(self._vocab_size)).tolist()
        return tokens
