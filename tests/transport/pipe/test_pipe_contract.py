"""Every kind of pipe keeps the contract that `kvferry.testing` has for all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pipe_support import CAPACITY, KINDS

from kvferry.core.errors import UnknownName
from kvferry.testing.memory_pipe import memory_pipe
from kvferry.testing.pipe import PipeContract, PipeEnds
from kvferry.testing.pipe_ends import Ends, fill
from kvferry.transport.pipe.base import PipeSettings, pipe_kind


class TestMemoryPipe(PipeEnds):
    @asynccontextmanager
    async def pipe(self, settings: PipeSettings) -> AsyncIterator[Ends]:
        sender, receiver = memory_pipe(settings)
        try:
            yield sender, receiver
        finally:
            await sender.close()
            await receiver.close()

    async def test_full_of_nothing(self, ends: Ends) -> None:
        assert await fill(ends[0], None) <= CAPACITY // 64


class TestGlooPipe(PipeContract):
    kind = "gloo"

    async def test_full_of_nothing(self, ends: Ends) -> None:
        assert await fill(ends[0], None) <= CAPACITY // 64


class TestPlainPipe(PipeContract):
    kind = KINDS["plain"]
    path = str(Path(__file__).parents[1] / "support")


def test_an_unknown_kind() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gloo'"):
        pipe_kind("glo")
