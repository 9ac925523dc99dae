"""Every lookup buffer keeps the contract that `kvferry.testing` has for all."""

from __future__ import annotations

from typing import Any

from pipe_support import KINDS

from kvferry.testing.lookup_buffer import LookupBufferContract
from support.certificates import member_options


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
