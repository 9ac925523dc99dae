"""Threads, and the loops of a process's main thread, which start after the struct types that they decode are built.

msgspec 0.22 builds the description of a struct type at its first use. A second thread that uses the type meanwhile
reads fields that are not set yet, and the process ends with a segmentation fault (`json_decode_struct_map_inner`). So
kvferry starts threads, executors and event loops here only, and each start builds the types that were imported since
the last.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

NICENESS = 10
"""Added to the niceness of a thread whose priority is lowered: beside a busy thread on the same core it gets a tenth of
the time."""

_built_types: set[type[msgspec.Struct]] = set()
_build_lock = threading.Lock()


def build_struct_types() -> None:
    """Build the descriptions of all struct types that are imported: 30 ms at first, then 0.1 ms. Call it directly only
    where another library starts the threads, as in vLLM's processes."""
    with _build_lock:
        for kind in _subclasses(msgspec.Struct):
            if kind in _built_types:
                continue
            # A type whose annotations are not defined yet is built by a later call. TypeError: a type that is never
            # decoded, such as one with fields of classes.
            with suppress(NameError, AttributeError):
                with suppress(TypeError, ValueError):
                    msgspec.json.Decoder(kind)
                _built_types.add(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


class Thread(threading.Thread):
    """A daemon thread: the end of the process does not wait for it."""

    def __init__(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        super().__init__(target=target, args=arguments, name=name, daemon=True)

    def start(self) -> None:
        build_struct_types()
        super().start()


class ThreadPool(ThreadPoolExecutor):
    """An executor of at most `max_workers` threads; `None`: as many as Python's."""

    def __init__(self, max_workers: int | None = None, *, name: str) -> None:
        build_struct_types()
        super().__init__(max_workers, thread_name_prefix=name)


def run_in_thread(function: Callable[[], T], *, name: str, normal_s: float) -> asyncio.Future[T]:
    """Run a function in a thread of its own. After `normal_s` seconds the priority of the thread is lowered, so that a
    long calculation does not take the time of threads that others wait for. Only Linux has priorities of threads."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)
        else:
            result.set_result(value)

    thread = Thread(run, name=name)
    thread.start()
    awaited = asyncio.wrap_future(result)
    timer = asyncio.get_running_loop().call_later(normal_s, _lower_priority, thread)
    awaited.add_done_callback(lambda _: timer.cancel())
    return awaited


def _lower_priority(thread: Thread) -> None:
    if sys.platform != "linux" or thread.native_id is None or not thread.is_alive():
        return
    with suppress(OSError):  # it ended meanwhile, or has the lowest priority already
        os.setpriority(os.PRIO_PROCESS, thread.native_id, os.getpriority(os.PRIO_PROCESS, thread.native_id) + NICENESS)


class _UnjoinedThreads(ThreadPool):
    """An event loop's executor that does not wait for its threads at the end, such as for the look-up of a name whose
    server does not answer."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run`, without waiting for threads, for a command that ends with `exit_process`."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_UnjoinedThreads(name="kvferry"))
        return runner.run(main)


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run`, on the loop of uvloop, whose iterations take a third of the time of asyncio's."""
    import uvloop  # most commands do without

    build_struct_types()
    return uvloop.run(main)
