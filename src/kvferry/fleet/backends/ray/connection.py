"""The connection of this process to a Ray cluster, and how Ray is asked without waiting for ever.

Ray has one connection in a process, and some of its functions wait until the cluster answers. They are called in
threads that nobody has to wait for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayError

from kvferry.core.errors import ConfigError

_CONNECT_S = 30.0
_SHUTDOWN_S = 10.0

Result = TypeVar("Result")


class RayConnection:
    """Shared by all backends of the process; the last one closes it. One that was there before stays."""

    _num_users, _is_ours = 0, False
    hangs = False
    """Whether it could not be closed in time."""

    @classmethod
    async def open(cls, address: str, namespace: str) -> None:
        """Connect, or use the connection that is there. Raises `ConfigError`."""
        if not ray.is_initialized():
            await cls._connect(address, namespace)
            cls._is_ours = True
        cls._num_users += 1

    @classmethod
    async def _connect(cls, address: str, namespace: str) -> None:
        where = f"Ray at {address}" if address else "Ray"
        logging.getLogger("ray").setLevel(logging.ERROR)
        told: dict[str, Any] = {"address": address or "auto", "namespace": namespace, "configure_logging": False}
        try:
            await in_thread(lambda: ray.init(log_to_driver=False, **told), _CONNECT_S)
            _take_back(signal.SIGTERM)
        except TimeoutError as error:
            raise ConfigError(f"{where} does not answer within {_CONNECT_S:g} s; see `ray status`") from error
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{where} cannot be reached: {why} (this machine must be in the cluster: `ray start --head` on the"
                " first machine, and on each other one the command that it prints, `ray start --address=…`)"
            ) from error

    @classmethod
    async def close(cls) -> None:
        """End one use of the connection. Called once for each `open`."""
        cls._num_users -= 1
        if not cls._num_users and cls._is_ours:
            cls._is_ours = False
            try:
                await in_thread(ray.shutdown, _SHUTDOWN_S)
            except TimeoutError:
                cls.hangs = True


def _take_back(number: int) -> None:
    """Handle a signal as before. Ray has put itself in front of the handler: it would write a stack, call the handler,
    and abort the process three seconds later, in the middle of what it does to end."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(number)) is not None:
        signal.signal(number, handler)
        signal.siginterrupt(number, False)


async def in_thread(
    call: Callable[[], Result], within_s: float, *, late: Callable[[Result], object] | None = None
) -> Result:
    """What `call` returns, called in a thread of its own. Raises what it raises, or `TimeoutError`; it then goes on
    without anybody who waits for it, and what it returns is given to `late`, in a thread too."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            if late is not None and error is None:
                threading.Thread(target=late, args=(result,), name="kvferry-ray", daemon=True).start()
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

    threading.Thread(target=run, name="kvferry-ray", daemon=True).start()
    async with asyncio.timeout(within_s):
        return await future


def answer_of(reference: Any) -> asyncio.Future[Any]:
    """The result of an actor's method, to be waited for by `asyncio.wait`, which does not cancel it: Ray goes on."""
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask for it
    return future


async def answer(reference: Any, within_s: float | None) -> Any:
    """The result of an actor's method. Raises `TimeoutError`, or what Ray or the method raises."""
    future = answer_of(reference)
    await asyncio.wait([future], timeout=within_s)
    if not future.done():
        raise TimeoutError
    return future.result()
