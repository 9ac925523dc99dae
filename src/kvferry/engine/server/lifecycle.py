"""The server's end, in stages: accepting, draining (running requests may end), aborting (they may not)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Never

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvferry.core.errors import RequestError, Unavailable


class Lifecycle:
    """Owns the stage the server is in. Used from the server's event loop only."""

    def __init__(self) -> None:
        self._draining = False
        self._aborting = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether no new request is taken."""
        return self._draining

    def require_accepting(self) -> None:
        """Raise `Unavailable` when the server is about to end."""
        if self._draining:
            raise Unavailable("the server is shutting down")

    def drain(self) -> None:
        """Take no new request."""
        self._draining = True

    def abort(self) -> None:
        """End the running requests, each with an error that says why."""
        self._draining = True
        self._aborting.set()

    async def fail_on_abort(self) -> Never:
        """Wait for `abort`, then raise `Unavailable`."""
        await self._aborting.wait()
        raise Unavailable("the server is shutting down, and the request was not done in time")


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body as soon as the client leaves, and raise `ClientDisconnect`. The request must have been read."""
    with single_error():
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive))
            yield
            watcher.cancel()


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the one error that counts instead of a task group's bundle: a `RequestError` if there is one."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        raise next((leaf for leaf in leaves if isinstance(leaf, RequestError)), leaves[0]) from None


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
