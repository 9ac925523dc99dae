"""Waiting for what no event announces: the only sleeps of tests that wait."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], within_s: float = 60.0, every_s: float = 0.01) -> None:
    """Wait until `condition()`, or what it returns when awaited, is true; it is evaluated every `every_s` seconds.
    Raises `TimeoutError` after `within_s`."""
    async with asyncio.timeout(within_s):
        while not (await result if inspect.isawaitable(result := condition()) else result):
            await asyncio.sleep(every_s)


def until(
    condition: Callable[[], Any], within_s: float = 60.0, context: str | Callable[[], str] = "", every_s: float = 0.02
) -> None:
    """Wait until `condition()` is true, without an event loop. Fails after `within_s` with the end of `context`, or of
    what it returns then."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= deadline:
            text = context if isinstance(context, str) else context()
            raise AssertionError(f"not within {within_s} s\n{text[-3000:]}")
        time.sleep(every_s)
