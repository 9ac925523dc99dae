"""The media that `transfer.py` compares: kvferry's transports, and beside each the plain way of doing the same.

A medium serves a memory, or opens a served one and reads spans of it into its own. What a reader can prepare before
it knows that the data is there (descriptor lists, address arrays) it prepares outside of the timing.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.messages.wire import Message
from kvferry.transport.checksum import digest
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener
from kvferry.transport.cuda.driver import CudaDriver
from kvferry.transport.fabric.base import FabricContext, build_fabrics
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.options import TransportOptions
from kvferry.transport.shared_memory import SharedSegment
from kvferry.transport.tls import ChannelTls, channel_tls

Spans = list[Span]
PAGE = 4096
BATCH = 512


class Memory:
    """A region in shared memory. `words` looks at it as 8-byte integers."""

    def __init__(self, num_bytes: int) -> None:
        self.segment = SharedSegment.create(num_bytes)
        self.address, self.num_bytes = self.segment.address, num_bytes
        self.words = np.frombuffer(self.segment.buffer, np.int64)
        self.view = memoryview(self.segment.buffer).cast("B")

    @property
    def name(self) -> str:
        """By which another process finds it."""
        return self.segment.name

    def set(self, words: NDArray[np.int64]) -> None:
        """Write all words."""
        self.words[:] = words

    def get(self, start: int, stop: int) -> NDArray[np.int64]:
        """Some of the words."""
        return self.words[start:stop]

    def blocks(self, layout: KVLayout) -> BlockMemory:
        """The region as an instance's blocks."""
        return BlockMemory.dense(layout, self.num_bytes // PAGE, self.address, segment=self.segment.name)

    def close(self) -> None:
        """Give it back."""
        self.segment.close()


class DoubleMemory(Memory):
    """A region in shared memory that passes for device memory, where the driver is a stand-in (`gpu.double`)."""

    def blocks(self, layout: KVLayout) -> BlockMemory:
        return BlockMemory.dense(layout, self.num_bytes // PAGE, self.address, device="cuda:0")


class DeviceMemory(Memory):
    """A region in the memory of a GPU, such as "cuda:0"."""

    def __init__(self, num_bytes: int, device: str) -> None:
        import torch

        self.device = device
        self._tensor = torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
        self.address, self.num_bytes = self._tensor.data_ptr(), num_bytes

    @property
    def name(self) -> str:
        """Found by its handle, which the media exchange."""
        return ""

    def set(self, words: NDArray[np.int64]) -> None:
        import torch

        self._tensor.copy_(torch.from_numpy(words))
        torch.cuda.synchronize(self.device)

    def get(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._tensor[start:stop].cpu().numpy()

    def blocks(self, layout: KVLayout) -> BlockMemory:
        return BlockMemory.dense(layout, self.num_bytes // PAGE, self.address, device=self.device)

    def close(self) -> None:
        del self._tensor


def make_memory(kind: str, num_bytes: int) -> Memory:
    """A region of host memory ("host"), of a GPU's ("cuda:0"), or of what passes for that ("double")."""
    if kind == "host":
        return Memory(num_bytes)
    return DoubleMemory(num_bytes) if kind == "double" else DeviceMemory(num_bytes, kind)


class Medium(ABC):
    """See the module. `serve` and `wait` in one process; the rest in the other."""

    scatters = True
    """Whether it moves the blocks that it is given: all but those that only show a limit."""

    def serve(self, memory: Memory) -> dict[str, Any]:
        """Begin to serve; how to reach it, JSON-able."""
        return {}

    def wait(self) -> None:
        """Until stdin closes."""
        sys.stdin.read()

    @abstractmethod
    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        """Reach what is served."""

    def prepare(self, remote: Spans, local: Spans) -> Any:
        """The argument of `read`."""
        return remote, local

    @abstractmethod
    def read(self, prepared: Any) -> None:
        """Fill the local spans with the remote ones."""

    def close(self) -> None:
        """Part with it."""


class Memcpy(Medium):
    """One `memcpy` a block in a loop in C, from the other process's memory: the limit."""

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._theirs, self._ours = SharedSegment.attach(where["segment"]), memory
        self._copy = _compiled(
            "#include <string.h>\n#include <stdint.h>\n"
            "void copy(const uint64_t *to, const uint64_t *from, const uint64_t *length, long count) {\n"
            "  for (long i = 0; i < count; i++) memcpy((void *)to[i], (void *)from[i], length[i]);\n}\n"
        )

    def prepare(self, remote: Spans, local: Spans) -> Any:
        theirs, ours = np.array(remote, np.uint64), np.array(local, np.uint64)
        arrays = (ours[:, 0] + self._ours.address, theirs[:, 0] + self._theirs.address, theirs[:, 1].copy())
        return *arrays, len(remote)

    def read(self, prepared: Any) -> None:
        *arrays, count = prepared
        self._copy(*(array.ctypes.data for array in arrays), count)


class OneCopy(Medium):
    """One contiguous copy of as many bytes within the reading process, or between its GPU and that of the other: the
    limit of the memory, or of the link."""

    scatters = False

    def serve(self, memory: Memory) -> dict[str, Any]:
        return {"device": getattr(memory, "device", "")}

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._memory, self._device = memory, where["device"]

    def prepare(self, remote: Spans, local: Spans) -> Any:
        num_words = sum(length for _, length in local) // 8
        if not isinstance(self._memory, DeviceMemory):
            return self._memory.words[:num_words], self._memory.words[num_words : 2 * num_words]
        import torch

        self._source = torch.zeros(num_words, dtype=torch.int64, device=self._device)
        return self._memory._tensor[:num_words], self._source

    def read(self, prepared: Any) -> None:
        target, source = prepared
        if not isinstance(self._memory, DeviceMemory):
            np.copyto(target, source)
            return
        import torch

        target.copy_(source)
        torch.cuda.synchronize(self._memory.device)


class DriverCopies(Medium):
    """One `cuMemcpyDtoDAsync` a block in a loop in C, from the other process's device memory, then the stream is waited
    for: the limit of copies that the driver makes."""

    def serve(self, memory: Memory) -> dict[str, Any]:
        assert isinstance(memory, DeviceMemory)
        handle, offset = CudaDriver(memory.device).export(memory.address)
        return {"handle": base64.b64encode(handle).decode(), "offset": offset}

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        assert isinstance(memory, DeviceMemory)
        theirs = CudaDriver(memory.device).open(base64.b64decode(where["handle"]))[0] + where["offset"]
        self._addresses = theirs, memory.address
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        self._copy = _compiled(
            "#include <stdint.h>\n"
            "int cuMemcpyDtoDAsync_v2(uint64_t, uint64_t, uint64_t, void *); int cuStreamSynchronize(void *);\n"
            "int copy(const uint64_t *to, const uint64_t *from, const uint64_t *length, long count) {\n"
            "  for (long i = 0; i < count; i++) if (cuMemcpyDtoDAsync_v2(to[i], from[i], length[i], 0)) return 1;\n"
            "  return cuStreamSynchronize(0);\n}\n"
        )

    def prepare(self, remote: Spans, local: Spans) -> Any:
        theirs, ours = np.array(remote, np.uint64), np.array(local, np.uint64)
        arrays = (ours[:, 0] + self._addresses[1], theirs[:, 0] + self._addresses[0], theirs[:, 1].copy())
        return *arrays, len(remote)

    def read(self, prepared: Any) -> None:
        *arrays, count = prepared
        assert self._copy(*(array.ctypes.data for array in arrays), count) == 0


class Gather(DriverCopies):
    """One kernel of PyTorch's for all blocks, within one process: about what a kernel that copies blocks can do."""

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        assert isinstance(memory, DeviceMemory)
        self._tensor = memory._tensor

    def prepare(self, remote: Spans, local: Spans) -> Any:
        import torch

        size, device = remote[0][1], self._tensor.device
        numbers = [torch.tensor([offset // size for offset, _ in side], device=device) for side in (remote, local)]
        source = torch.arange(len(self._tensor), device=device)
        return source.view(-1, size // 8), self._tensor.view(-1, size // 8), *numbers

    def read(self, prepared: Any) -> None:
        import torch

        source, target, theirs, ours = prepared
        target[ours] = source[theirs]
        torch.cuda.synchronize(target.device)


class PromptTraits(Message, frozen=True):
    """Of which spans a digest is wanted."""

    spans: Spans


class Digest(Message, frozen=True):
    """The answer."""

    digest: bytes


class Ours(Medium):
    """One of kvferry's transports."""

    transport = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    tls: ChannelTls | None = None

    def serve(self, memory: Memory) -> dict[str, Any]:
        self._build(memory)
        return self._fabric.describe()

    def wait(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._listener.serve())
        await asyncio.to_thread(sys.stdin.read)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await self._fabric.close()

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._build(memory)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._peer = self._runner.run(self._fabric.connect(where, time.monotonic() + 30))

    def read(self, prepared: Any) -> None:
        remote, local = prepared
        self._runner.run(self._peer.read(remote, local, time.monotonic() + 60))

    def close(self) -> None:
        self._runner.run(self._peer.close())
        self._runner.run(self._fabric.close())
        self._runner.close()

    def _build(self, memory: Memory) -> None:
        layout = KVLayout(model_fingerprint="m", layers=(LayerLayout(1, 512, 512),), dtype="float32", block_size=1)
        blocks = memory.blocks(layout)
        identity = Identity("transfer", layout)
        self._listener = Listener(identity, "", tls=self.tls)
        self._context = FabricContext(blocks, self._listener, TransportOptions(**self.options))
        [self._fabric] = build_fabrics(self.transport, self._context)


class OursUnderTls(Ours):
    """TCP under TLS, with a certificate made for the occasion."""

    transport = "tcp"

    def serve(self, memory: Memory) -> dict[str, Any]:
        import trustme  # which only the tests' environment has

        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        self._folder = tempfile.TemporaryDirectory()
        files = {"tls_cert": f"{self._folder.name}/cert.pem", "tls_ca": f"{self._folder.name}/ca.pem"}
        issued.private_key_and_cert_chain_pem.write_to_path(files["tls_cert"])
        authority.cert_pem.write_to_path(files["tls_ca"])
        self.tls = channel_tls(TransportOptions(tls_cert=files["tls_cert"], tls_ca=files["tls_ca"]))
        return super().serve(memory) | files

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self.tls = channel_tls(TransportOptions(tls_cert=where["tls_cert"], tls_ca=where["tls_ca"]))
        super().open(memory, where)


class OursCompared(Ours):
    """TCP, and digests of both sides are compared, as a hand-off does unless `checksum` is false."""

    transport = "tcp"

    def serve(self, memory: Memory) -> dict[str, Any]:
        where = super().serve(memory)
        self._listener.handle("digest", self._digest)
        return where

    async def _digest(self, connection: Connection) -> None:
        while True:
            request: PromptTraits = await connection.receive(PromptTraits)
            await connection.send(Digest(await digest(self._context.memory, request.spans)))

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        super().open(memory, where)
        dial = self._listener.dial(where["host"], where["port"], "digest", time.monotonic() + 30)
        self._connection = self._runner.run(dial)

    def read(self, prepared: Any) -> None:
        super().read(prepared)
        self._runner.run(self._compare(*prepared))

    async def _compare(self, remote: Spans, local: Spans) -> None:
        await self._connection.send(PromptTraits(remote))
        ours = await digest(self._context.memory, local)
        theirs: Digest = await self._connection.receive(Digest)
        assert theirs.digest == ours

    def close(self) -> None:
        self._runner.run(self._connection.close())
        super().close()


class RawSockets(Medium):
    """Blocking TCP sockets, a thread for each stream: `sendmsg` of many blocks, `recvmsg_into` or `recv_into`."""

    streams = 1
    group_bytes = 2**18

    def serve(self, memory: Memory) -> dict[str, Any]:
        listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(listening, memory), daemon=True).start()
        return {"port": listening.getsockname()[1]}

    def _accept(self, listening: socket.socket, memory: Memory) -> None:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=self._answer, args=(sock, memory), daemon=True).start()

    def _answer(self, sock: socket.socket, memory: Memory) -> None:
        _tune(sock)
        while header := sock.recv(8, socket.MSG_WAITALL):
            raw = sock.recv(16 * int.from_bytes(header, "little"), socket.MSG_WAITALL)
            spans = np.frombuffer(raw, np.int64).reshape(-1, 2).tolist()
            for views in _grouped(memory.view, spans, self.group_bytes):
                _send_all(sock, views)

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._view = memory.view
        self._sockets = [socket.create_connection(("127.0.0.1", where["port"])) for _ in range(self.streams)]
        for sock in self._sockets:
            _tune(sock)

    def read(self, prepared: Any) -> None:
        remote, local = prepared
        share = -(-len(remote) // self.streams)
        parts = [slice(start, start + share) for start in range(0, len(remote), share)]
        threads = [
            threading.Thread(target=self._read, args=(sock, remote[part], local[part]))
            for sock, part in zip(self._sockets[1:], parts[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        self._read(self._sockets[0], remote[parts[0]], local[parts[0]])
        for thread in threads:
            thread.join()

    def _read(self, sock: socket.socket, remote: Spans, local: Spans) -> None:
        sock.sendall(len(remote).to_bytes(8, "little") + np.array(remote, np.int64).tobytes())
        for views in _grouped(self._view, local, self.group_bytes):
            _receive_all(sock, views)


class RawSockets2(RawSockets):
    """Two streams."""

    streams = 2


class NixlApi(Medium):
    """NIXL's own Python API as its documentation uses it: descriptor lists prepared for all blocks beforehand.

    Without a progress thread where it reads, since that would take half of the one core.
    """

    def serve(self, memory: Memory) -> dict[str, Any]:
        self._agent = self._make("serving", memory, progress=True)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": memory.address}

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._agent = self._make("reading", memory, progress=False)
        self._peer = self._agent.add_remote_agent(base64.b64decode(where["metadata"]))
        self._addresses = where["address"], memory.address

    def prepare(self, remote: Spans, local: Spans) -> Any:
        def listed(peer: str, address: int, spans: Spans) -> Any:
            rows = np.array([(address + offset, length, 0) for offset, length in spans], np.uint64)
            return self._agent.prep_xfer_dlist(peer, self._agent.get_xfer_descs(rows, self._kind))

        theirs, ours = self._addresses
        return listed("", ours, local), listed(self._peer, theirs, remote), np.arange(len(local), dtype=np.int32)

    def read(self, prepared: Any) -> None:
        ours, theirs, indices = prepared
        handle = self._agent.make_prepped_xfer("READ", ours, indices, theirs, indices)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()

    def _make(self, name: str, memory: Memory, *, progress: bool) -> Any:
        from nixl._api import nixl_agent, nixl_agent_config

        self._kind = "VRAM" if isinstance(memory, DeviceMemory) else "DRAM"
        agent = nixl_agent(f"{name}-{os.getpid()}", nixl_agent_config(progress, False, backends=["UCX"]))
        self._registered = agent.register_memory([(memory.address, memory.num_bytes, 0, "")], self._kind)
        return agent


class MooncakeApi(Medium):
    """Mooncake's own Python API, in batches that it takes."""

    def serve(self, memory: Memory) -> dict[str, Any]:
        self._start(memory)
        return {"segment_name": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": memory.address}

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._start(memory)
        self._segment, self._addresses = where["segment_name"], (where["address"], memory.address)

    def prepare(self, remote: Spans, local: Spans) -> Any:
        theirs, ours = self._addresses
        batches = []
        for start in range(0, len(local), BATCH):
            part = slice(start, start + BATCH)
            addresses = [
                [base + offset for offset, _ in side[part]] for base, side in ((ours, local), (theirs, remote))
            ]
            batches.append((*addresses, [length for _, length in local[part]]))
        return batches

    def read(self, prepared: Any) -> None:
        for batch in prepared:
            assert self._engine.batch_transfer_sync_read(self._segment, *batch) == 0

    def _start(self, memory: Memory) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(memory.address, memory.num_bytes) == 0


PAIR = 0
"""ZeroMQ's."""


def _zmq() -> Any:
    return importlib.import_module("zmq")


class ZeroMq(Medium):
    """pyzmq over TCP: multipart messages of blocks, sent uncopied, copied once into place."""

    def serve(self, memory: Memory) -> dict[str, Any]:
        self._socket = _zmq().Context().socket(PAIR)
        self._view = memory.view
        return {"port": self._socket.bind_to_random_port("tcp://127.0.0.1")}

    def wait(self) -> None:
        threading.Thread(target=self._answer, daemon=True).start()
        super().wait()

    def _answer(self) -> None:
        while True:
            spans = np.frombuffer(self._socket.recv(), np.int64).reshape(-1, 2).tolist()
            for start in range(0, len(spans), 64):
                views = [self._view[offset : offset + length] for offset, length in spans[start : start + 64]]
                self._socket.send_multipart(views, copy=False)

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._socket = _zmq().Context().socket(PAIR)
        self._socket.connect(f"tcp://127.0.0.1:{where['port']}")
        self._view = memory.view

    def read(self, prepared: Any) -> None:
        remote, local = prepared
        self._socket.send(np.array(remote, np.int64).tobytes())
        for start in range(0, len(local), 64):
            frames: Any = self._socket.recv_multipart(copy=False)
            for (offset, length), frame in zip(local[start : start + 64], frames, strict=True):
                self._view[offset : offset + length] = frame.buffer


class Gloo(Medium):
    """`torch.distributed` send and receive, a tensor for each block, many under way."""

    window = 64

    def serve(self, memory: Memory) -> dict[str, Any]:
        self._memory = memory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        return {"port": self._port}

    def wait(self) -> None:
        import torch
        import torch.distributed as dist

        self._join(0, self._port)

        def answer() -> None:
            while True:
                count = torch.empty(1, dtype=torch.int64)
                dist.recv(count, 1)
                spans = torch.empty(int(count), 2, dtype=torch.int64)
                dist.recv(spans, 1)
                self._all(dist.isend, 1, self._memory, spans.tolist())

        threading.Thread(target=answer, daemon=True).start()
        super().wait()

    def open(self, memory: Memory, where: dict[str, Any]) -> None:
        self._memory = memory
        self._join(1, where["port"])

    def read(self, prepared: Any) -> None:
        import torch
        import torch.distributed as dist

        remote, local = prepared
        dist.send(torch.tensor([len(remote)]), 0)
        dist.send(torch.tensor(remote), 0)
        self._all(dist.irecv, 0, self._memory, local)

    def _all(self, move: Callable[..., Any], rank: int, memory: Memory, spans: Any) -> None:
        import torch

        tensor = torch.frombuffer(memory.segment.buffer, dtype=torch.uint8)
        works = []
        for number, (offset, length) in enumerate(spans):
            works.append(move(tensor[offset : offset + length], rank))
            if number >= self.window:
                works[number - self.window].wait()
        for work in works[-self.window :]:
            work.wait()

    def _join(self, rank: int, port: int) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def _compiled(code: str) -> Any:
    """Its function `copy`, of three arrays of numbers and their length. What else it calls, this process has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "copy.c", Path(folder) / "copy.so"
        source.write_text(code)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        copy = ctypes.CDLL(str(library)).copy
    copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long]
    return copy


def _ours(transport: str, **options: Any) -> type[Ours]:
    return type(f"Ours_{transport}", (Ours,), {"transport": transport, "options": options})


IN_HOST_MEMORY: dict[str, type[Medium]] = {
    "memcpy": Memcpy,
    "kvferry shm": _ours("shm"),
    "kvferry nixl": _ours("nixl"),
    "NIXL's API": NixlApi,
    "kvferry tcp": _ours("tcp"),
    "kvferry tcp, checksums": OursCompared,
    "kvferry tcp, TLS": OursUnderTls,
    "socket": RawSockets,
    "kvferry tcp, 2 streams": _ours("tcp", streams=2),
    "socket, 2 streams": RawSockets2,
    "kvferry mooncake": _ours("mooncake"),
    "Mooncake's API": MooncakeApi,
    "ZeroMQ": ZeroMq,
    "kvferry gloo": _ours("gloo"),
    "gloo": Gloo,
}
IN_DEVICE_MEMORY: dict[str, type[Medium]] = {
    "one copy": OneCopy,
    "a gather kernel": Gather,
    "driver copies": DriverCopies,
    "kvferry cuda_ipc": _ours("cuda_ipc"),
    "kvferry nccl": _ours("nccl"),
}
"""Those that host memory cannot be moved by. NIXL moves both."""
MEDIA = IN_HOST_MEMORY | IN_DEVICE_MEMORY


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _grouped(view: memoryview, spans: Any, num_bytes: int) -> list[list[memoryview]]:
    groups: list[list[memoryview]] = []
    room = 0
    for offset, length in spans:
        if room < length:
            groups.append([])
            room = max(num_bytes, length)
        groups[-1].append(view[offset : offset + length])
        room -= length
    return groups


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        views = _rest(views, sock.sendmsg(views))


def _receive_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        views = _rest(views, sock.recvmsg_into(views)[0])


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for number, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[number + 1 :]]
        num_bytes -= len(view)
    return []
