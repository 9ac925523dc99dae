"""The connection of this process to a Ray cluster, and calls of Ray's functions with deadlines.

Ray has one connection in a process, and some of its functions wait until the cluster answers. They are called in
daemon threads, which need not be joined.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayError

from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import Thread

logger = logging.getLogger(__name__)


Result = TypeVar("Result")


class RayConnection:
    """The connection that all backends of the process share; the last one closes it. A connection that existed before
    stays open."""

    shutdown_s = 10.0
    start_s = 120.0
    """Maximum seconds for the start of a cluster on this machine. It takes a few seconds if cores are free."""
    connect_s = 30.0

    _num_users, _has_connected = 0, False
    _ended: threading.Event | None = None
    """Ends the cluster of this process; None: it has none of its own."""
    hangs = False
    """True if it could not be closed in time."""

    @classmethod
    async def open(cls, address: str, namespace: str, *, own_cpus: int | None = None) -> None:
        """Connect, or use an existing connection. `own_cpus`: if no address is set and there is no cluster, start one
        on this machine with this number of logical CPUs. It ends with the connection. Raises `ConfigError`."""
        if not ray.is_initialized():
            is_named = bool(address or os.environ.get("RAY_ADDRESS"))
            await cls._connect(address, namespace, None if is_named else own_cpus)
            cls._has_connected = True
        cls._num_users += 1

    @classmethod
    async def _connect(cls, address: str, namespace: str, own_cpus: int | None) -> None:
        where, timeout_s = f"Ray at {address}" if address else "Ray", cls.connect_s
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            try:
                await _init(address or "auto", namespace, timeout_s)
            except ConnectionError:
                if own_cpus is None:
                    raise
                logger.info("there is no Ray cluster here; one is started on this machine, and ends with this command")
                where, timeout_s, cls._ended = "the Ray cluster of this command", cls.start_s, threading.Event()
                cluster_settings = {"include_dashboard": False, "num_cpus": own_cpus}
                await _init("local", namespace, timeout_s, cls._ended, cluster_settings)
            _restore_handler(signal.SIGTERM)
        except TimeoutError as error:
            raise ConfigError(f"{where} does not answer within {timeout_s:g} s; see `ray status`") from error
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{where} cannot be reached: {reason} (this machine must be in the cluster: `ray start --head` on the"
                " first machine, and on each other one the command that it prints, `ray start --address=…`)"
            ) from error

    @classmethod
    async def close(cls) -> None:
        """End one use of the connection. Called once for each `open`."""
        cls._num_users -= 1
        if not cls._num_users and cls._has_connected:
            cls._has_connected = False
            try:
                await in_thread(ray.shutdown, cls.shutdown_s)
            except TimeoutError:
                cls.hangs = True
            finally:
                if cls._ended is not None:
                    cls._ended.set()


async def _init(
    address: str, namespace: str, timeout_s: float, until: threading.Event | None = None, more: Mapping[str, Any] = {}
) -> None:
    settings = {"address": address, "namespace": namespace, "configure_logging": False, "log_to_driver": False, **more}
    await in_thread(lambda: ray.init(**settings), timeout_s, until=until)


def _restore_handler(number: int) -> None:
    """Restore the handler of a signal. Ray has replaced it by its own, which would write a stack trace, call the former
    handler, and abort the process three seconds later, during its shutdown."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(number)) is not None:
        signal.signal(number, handler)
        signal.siginterrupt(number, False)


async def in_thread(
    call: Callable[[], Result],
    timeout_s: float,
    *,
    late: Callable[[Result], object] | None = None,
    until: threading.Event | None = None,
) -> Result:
    """Return the result of `call`, called in a thread of its own. Raises its error, or `TimeoutError`. After that, the
    call continues, and `late` gets its result, in a thread too. The thread ends after the call, or at `until`: Linux
    ends processes that are to die with their parent when the thread that has started them ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            if late is not None and error is None:
                Thread(late, result, name="kvferry-ray").start()
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)
        if until is not None:
            until.wait()

    Thread(run, name="kvferry-ray").start()
    async with asyncio.timeout(timeout_s):
        return await future


def reply_future(reference: Any) -> asyncio.Future[Any]:
    """The result of an actor's method, for `asyncio.wait`, which does not cancel it: Ray continues."""
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may not be awaited any more
    return future


async def result_of(reference: Any, timeout_s: float | None) -> Any:
    """The result of an actor's method. Raises `TimeoutError`, or what Ray or the method raises."""
    future = reply_future(reference)
    await asyncio.wait([future], timeout=timeout_s)
    if not future.done():
        raise TimeoutError
    return future.result()
