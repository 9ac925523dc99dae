"""Waiting for what no event announces: the only sleeps of tests that wait."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], timeout_s: float = 60.0, interval_s: float = 0.01) -> None:
    """Wait until `condition()`, or what it returns when awaited, is true; it is evaluated every `interval_s` seconds.
    Raises `TimeoutError` after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not (await result if inspect.isawaitable(result := condition()) else result):
            await asyncio.sleep(interval_s)


def until(
    condition: Callable[[], Any],
    timeout_s: float = 60.0,
    context: str | Callable[[], str] = "",
    interval_s: float = 0.02,
) -> None:
    """Wait until `condition()` is true, without an event loop. Fails after `timeout_s` with the end of `context`, or of
    what it returns then."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            text = context if isinstance(context, str) else context()
            raise AssertionError(f"not within {timeout_s} s\n{text[-3000:]}")
        time.sleep(interval_s)
