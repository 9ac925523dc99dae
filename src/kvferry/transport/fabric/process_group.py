"""`torch.distributed` as a fabric: gloo between host memories, NCCL between two GPUs (never run: written without a
machine that has two).

Each pipe is a process group of two. The two processes start independently, and each may be in many groups, so there is
no global group and no store server: `Rendezvous` exchanges the values that both ends publish over kvferry's connection.
A call of a group cannot be cancelled. It runs in a thread of its own, where a cancelled call is left behind until it
fails too, at the latest after `CALL_S`. The group's sockets have no authentication: use them in trusted networks only.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, PeerLost, ProtocolError
from kvferry.core.messages.wire import Message
from kvferry.core.runtime.threads import Thread
from kvferry.transport.connection import Connection
from kvferry.transport.fabric.base import FabricContext
from kvferry.transport.fabric.pipe import PipeFabric, TensorPipe
from kvferry.transport.transfer_loop import run_together

SENDER, RECEIVER = 0, 1
CALL_S = 8.0
"""Maximum seconds of a call, which moves one piece, and takes far less if both ends work."""


class Published(Message, frozen=True):
    """A value for the other end's rendezvous."""

    key: str
    value: bytes


class Formed(Message, frozen=True):
    """This end is connected, or `error` has the reason why not."""

    error: str = ""


class ProcessGroupFabric(PipeFabric):
    """Reads over process groups, which move memory of `group_device`. A subclass makes the group, and waits for its
    operations."""

    group_device: torch.device

    @abstractmethod
    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        """A connected group of two. Called on a thread, may block; raises `RuntimeError`, as torch does."""

    def wait(self, work: Any) -> None:
        """Wait until the bytes of a send or receive have moved, for `CALL_S`. Called on a thread."""
        work.wait(timedelta(seconds=CALL_S))

    def discard(self, group: Any) -> None:
        """Abandon a group, perhaps during a call. gloo's connections are closed with the last reference to it."""

    async def open_pipe(self, connection: Connection, deadline: float, *, sends: bool) -> TensorPipe:
        """Form a group with the other end: exchange the published values, until both have joined it."""
        loop, rank = asyncio.get_running_loop(), SENDER if sends else RECEIVER
        outbox: asyncio.Queue[Message] = asyncio.Queue()  # bounded by the values of a rendezvous
        timeout_s = max(0.001, deadline - loop.time())
        store = Rendezvous(lambda value: loop.call_soon_threadsafe(outbox.put_nowait, value), timeout_s)
        groups: list[Any] = []

        async def join_group() -> None:
            try:
                groups.append(await in_thread(lambda: self.make_group(store, rank, timeout_s)))
            except Exception as error:  # noqa: BLE001 - torch may raise any type over a forged value of the peer
                outbox.put_nowait(Formed(f"{self.name}: {error}"[:2000]))
            else:
                outbox.put_nowait(Formed())

        async def send() -> None:
            message: Message | None = None
            while not isinstance(message, Formed):
                message = await outbox.get()
                await connection.send(message)
            _require(message, "this end")

        async def receive() -> None:
            while isinstance(message := await connection.receive(Published | Formed), Published):
                store.store_value(message)
            _require(message, "the peer")

        try:
            await run_together(join_group(), send(), receive())
        except BaseException:
            store.fail("the group was abandoned")
            for group in groups:
                self.discard(group)
            raise
        return GroupPipe(self, groups[0])


def _require(formed: Formed, end: str) -> None:
    if formed.error:
        raise PeerLost(f"{end} could not join the process group: {formed.error}")


_call_threads: set[threading.Thread] = set()


async def in_thread(call: Callable[[], Any]) -> Any:
    """Make a call in a thread of its own. If this is cancelled, the call continues, and its result is dropped."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again for the caller
            done.set_exception(error)
        finally:
            _call_threads.discard(threading.current_thread())

    thread = Thread(run, name="process-group")
    _call_threads.add(thread)
    thread.start()
    return await asyncio.wrap_future(done)


@atexit.register
def _wait_for_calls() -> None:
    """Wait for running calls: a process that exits while a thread is inside of a C++ library may crash."""
    for thread in list(_call_threads):
        thread.join(2 * CALL_S)


class GroupPipe(TensorPipe):
    """One end of a pipe, which owns its group."""

    def __init__(self, fabric: ProcessGroupFabric, group: Any) -> None:
        self._fabric, self._group = fabric, group

    async def send_tensor(self, tensor: Tensor) -> None:
        """Return when everything was handed to the network; the receiver is receiving already."""
        fabric, group = self._fabric, self._group
        moved = tensor.to(fabric.group_device)
        await in_thread(lambda: fabric.wait(group.send([moved], RECEIVER, 0)))

    async def recv_tensor(self, num_bytes: int) -> Tensor:
        """Receive into new memory, which a cancelled call may still write to."""
        fabric, group = self._fabric, self._group
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=fabric.group_device)
        await in_thread(lambda: fabric.wait(group.recv([tensor], SENDER, 0)))
        return tensor.to(fabric.device)

    async def close(self) -> None:
        group, self._group = self._group, None
        self._fabric.discard(group)


class GlooFabric(ProcessGroupFabric):
    """Joins any two instances with a network between them; gloo listens on the address of the instance's listener."""

    name = "gloo"
    over_tcp = True
    group_device = torch.device("cpu")

    def __init__(self, context: FabricContext) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise ConfigError("transport gloo needs a PyTorch with torch.distributed and gloo; use transport tcp")
        super().__init__(context)

    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.context.listener.host)]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, rank, 2, options)


class NcclFabric(ProcessGroupFabric):
    """Joins two GPUs that NCCL can connect. Never run; tests run it with a group of gloo's in place of NCCL's."""

    poll_s = 50e-6

    name = "nccl"

    def __init__(self, context: FabricContext) -> None:
        self.require_nccl()
        super().__init__(context)
        self.group_device = self.choose_device()

    def require_nccl(self) -> None:
        """Raise `ConfigError` without a GPU or NCCL."""
        if not torch.cuda.is_available() or not dist.is_available() or not dist.is_nccl_available():
            raise ConfigError(
                "transport nccl needs an NVIDIA GPU and a PyTorch with NCCL, which this machine does not have; set"
                " kv_connector_extra_config.transport to auto (or gloo) on both instances"
            )

    def choose_device(self) -> torch.device:
        """The GPU of the KV cache, or the current one if the KV cache is in host memory."""
        index = self.device.index if self.device.type == "cuda" else None
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def new_group(self, store: Rendezvous, rank: int, timeout: timedelta) -> Any:
        """A group of NCCL's, which connects with its first transfer."""
        torch.cuda.set_device(self.group_device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        """Make the group, and connect it by a first transfer: otherwise NCCL would use the store during the first
        tensor."""
        group = self.new_group(store, rank, timedelta(seconds=timeout_s))
        token = torch.zeros(1, dtype=torch.uint8, device=self.group_device)
        self.wait(group.send([token], RECEIVER, 0) if rank == SENDER else group.recv([token], SENDER, 0))
        return group

    def wait(self, work: Any) -> None:
        """Poll, since NCCL's own wait only orders streams."""
        deadline = SYSTEM_CLOCK.monotonic() + CALL_S
        while not work.is_completed():
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise RuntimeError("timed out waiting for NCCL")
            time.sleep(self.poll_s)
        work.wait()

    def discard(self, group: Any) -> None:
        group.abort()


class Rendezvous(dist.Store):  # type: ignore[misc, name-defined]
    """The store with which two processes form a group. `publish` is called, on any thread, with each value that this
    process sets; `store_value` and `fail` are called on the loop. Torch makes the group on a thread, which waits in
    `get`."""

    max_value_bytes = 8192
    max_values = 64

    def __init__(self, publish: Callable[[Published], object], timeout_s: float) -> None:
        super().__init__()
        self._publish, self._timeout_s = publish, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure = ""

    def store_value(self, published: Published) -> None:
        """Record a value that this process or the peer has set. Raises `ProtocolError` beyond the needs of a
        rendezvous."""
        with self._changed:
            if len(self._values) >= self.max_values or len(published.value) > self.max_value_bytes:
                raise ProtocolError("the peer publishes more than a rendezvous needs")
            self._values[published.key] = published.value
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Make every wait raise."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    # Called by torch, on the thread that makes the group.

    def set(self, key: str, value: Any) -> None:
        published = Published(key, value.encode() if isinstance(value, str) else bytes(value))
        self.store_value(published)
        self._publish(published)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            is_complete = self._changed.wait_for(lambda: self._failure or self.check(keys), self._timeout_s)
        if self._failure or not is_complete:  # through torch, which knows no other error
            raise RuntimeError(self._failure or "the peer did not publish what the group needs in time")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)
