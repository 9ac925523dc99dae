"""Groups of tasks that fail with one plain error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_together(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all; the first that raises ends the others, and its error is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is not itself a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def uncancelled(job: Coroutine[Any, Any, None]) -> None:
    """Await the job to its end, also while being cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(job)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
