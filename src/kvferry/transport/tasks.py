"""Groups of tasks that fail with one plain error, and tasks whose failure stays their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvferry.core.errors import KvferryError, TransferError

log = logging.getLogger(__name__)


def translated(error: BaseException) -> KvferryError:
    """The error itself where it is one of the tree; else a `TransferError` that tells of it, the mistake being ours."""
    return error if isinstance(error, KvferryError) else TransferError(f"unexpected {type(error).__name__}: {error}")


async def contained(job: Callable[[], Awaitable[object]], what: str) -> None:
    """Run a task that belongs to one request or one peer: what it raises ends it, and nobody beside it."""
    try:
        await job()
    except Exception:  # the edge between one request and the instance: the others must not hear of it
        log.exception("%s failed unexpectedly", what)


def call_contained(call: Callable[[], object], what: str, otherwise: Callable[[Exception], object]) -> None:
    """As `contained`, for a plain function; `otherwise` is told what it raised."""
    try:
        call()
    except Exception as error:  # as above
        log.exception("%s failed unexpectedly", what)
        otherwise(error)


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
