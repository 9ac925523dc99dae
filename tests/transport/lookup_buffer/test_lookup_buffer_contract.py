"""Every lookup buffer keeps the contract that `kvferry.testing` has for all."""

from __future__ import annotations

from typing import Any

import pytest
from kv_support import Region
from pipe_support import KINDS

from kvferry.testing.lookup_buffer import LookupBufferContract
from kvferry.transport.lookup_buffer.base import LookupBuffer, Source
from kvferry.transport.lookup_buffer.entries import EntryTable
from kvferry.transport.lookup_buffer.memory import MemoryLookupBuffer, MemoryNetwork
from support.certificates import member_options


class TestMemory(LookupBufferContract):
    @pytest.fixture(autouse=True)
    def _network(self) -> None:
        self.network: MemoryNetwork = {}

    def build(self, region: Region, table: EntryTable, number: int) -> tuple[LookupBuffer, Source]:
        source = Source("memory", number)
        return MemoryLookupBuffer(region.memory, table, self.network, source), source


class FabricContract(LookupBufferContract):
    lookup_buffer = "fabric"
    transport: str

    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"transport": cls.transport}


class TestShm(FabricContract):
    transport = "shm"


class TestTcp(FabricContract):
    transport = "tcp"


class TestTcpUnderTls(FabricContract):
    transport = "tcp"

    @classmethod
    def options(cls) -> dict[str, Any]:
        return super().options() | member_options()


class TestGloo(FabricContract):
    transport = "gloo"


class TestExamplePipe(FabricContract):
    transport = KINDS["example"]
