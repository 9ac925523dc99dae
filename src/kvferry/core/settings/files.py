"""Files that users name: read whole, within a bound and a deadline, and checked before work whose result goes there.

A file may be a pipe without a writer, or on a file system whose server does not answer: then not even a signal ends a
read. Reads are therefore made by threads that may be abandoned, never by an event loop.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import Thread

MAX_BYTES = 16 * 2**20
WAIT_S = 10.0
"""Max seconds for which a pipe has nothing to read, or a file system does not answer."""
_THREAD_GRACE_S = 5.0
"""Seconds beyond `WAIT_S` after which a reading thread is abandoned."""

T = TypeVar("T")


def read_whole(path: Path, wait_s: float = WAIT_S) -> bytes:
    """The content of a file of at most `MAX_BYTES`, or of a pipe. Raises a `ConfigError` that names it."""
    return run_within(path, wait_s + _THREAD_GRACE_S, lambda: _read(path, wait_s))


def require_file(path: Path, noun: str = "it") -> None:
    """Raise a `ConfigError` that names `path` unless it is a file that can be opened and read more than once."""
    if not run_within(path, WAIT_S, lambda: _is_plain(path)):
        raise ConfigError(f"{path}: {noun} must be a plain file")


def run_within(path: Path, timeout_s: float, func: Callable[[], T]) -> T:
    """Run `func`, which uses the file at `path`, in a thread, and return its result. Raises `ConfigError` after
    `timeout_s`, and abandons the thread."""
    results: list[T | BaseException] = []
    thread = Thread(_capture, func, results, name=f"reads {path}")
    thread.start()
    thread.join(timeout_s)
    if not results:
        raise ConfigError(f"{path} does not answer within {timeout_s:g} s")
    if isinstance(result := results[0], BaseException):
        raise result
    return result


def _capture(func: Callable[[], T], results: list[T | BaseException]) -> None:
    try:
        results.append(func())
    except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
        results.append(error)


class FileTask(Generic[T]):
    """Runs `func`, which uses the file at `path`, repeatedly for an event loop. A run that takes longer than
    `timeout_s` is left to its thread, and no other run starts before it has ended."""

    def __init__(self, path: Path, func: Callable[[], T], timeout_s: float = WAIT_S) -> None:
        self._path, self._func, self._timeout_s = path, func, timeout_s
        self._running: asyncio.Future[T] | None = None

    async def run(self) -> T:
        """The result. Raises what `func` raises, and `ConfigError` if it takes too long."""
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_future()
            work = (asyncio.get_running_loop(), self._running)
            Thread(self._work, *work, name=f"follows {self._path}").start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._running)
        except TimeoutError as error:
            raise ConfigError(f"{self._path} does not answer within {self._timeout_s:g} s") from error

    def _work(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
        results: list[T | BaseException] = []
        _capture(self._func, results)
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(_settle, future, results[0])


class TimedFile(io.RawIOBase):
    """A file or pipe of any length, read in turn. Raises `ConfigError` where a pipe has nothing to read for `wait_s`,
    and `OSError`."""

    def __init__(self, path: Path, wait_s: float = WAIT_S) -> None:
        self._path, self._wait_s = path, wait_s
        self._file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 - closed by `close`
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read as from a file in blocking mode."""
        parts: list[bytes] = []
        while size:
            if not self._poll.poll(self._wait_s * 1e3):
                raise ConfigError(f"{self._path}: nothing was written to this pipe for {self._wait_s:g} s")
            if not (chunk := self._file.read(size)):
                break
            parts.append(chunk)
            size -= len(chunk) if size > 0 else 0
        return b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if isinstance(result, BaseException):
        future.set_exception(result)
        future.exception()  # marks it as retrieved: the waiter may be gone
    else:
        future.set_result(result)


def _read(path: Path, wait_s: float) -> bytes:
    content, chunk = b"", None
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN)
            while chunk != b"" and len(content) <= MAX_BYTES:
                if not poll.poll(wait_s * 1e3):
                    raise ConfigError(f"{path}: nothing was written to this pipe for {wait_s:g} s")
                chunk = file.read(MAX_BYTES + 1 - len(content))
                content += chunk or b""
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL in it
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES // 2**20} MiB")
    return content


def _is_plain(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Opens a pipe even before it has a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def require_writable(flag: str, path: Path, **others: Path | None) -> None:
    """Raise `ConfigError` if no file can be written at `path`, or if it is one of the `others`, by flag, that the
    command reads or writes. Call it before the work whose result goes there."""
    for name, other in others.items():
        if other is not None and path.resolve() == other.resolve():
            raise ConfigError(f"{flag} {path}: this is --{name}; write to another file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: this may not be written")
