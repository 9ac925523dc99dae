"""NCCL's fabric on a machine without GPUs: groups of gloo's, whose work is polled and waited for as NCCL's is."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvferry.transport.fabric.process_group import CALL_S, NcclFabric, Rendezvous


class NcclOverGloo(NcclFabric):
    """Everything of `NcclFabric` but the library and the device."""

    name = "nccl_over_gloo"

    def require_nccl(self) -> None:
        assert dist.is_gloo_available()

    def choose_device(self) -> torch.device:
        return torch.device("cpu")

    def new_group(self, store: Rendezvous, rank: int, timeout: timedelta) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.context.listener.host)]
        options._timeout = timeout
        return Group(dist.ProcessGroupGloo(store, rank, 2, options))


class Group:
    """The part of a process group that is used."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return Work(self._group.send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return Work(self._group.recv(tensors, rank, tag))

    def abort(self) -> None:
        self._group.abort()


class Work:
    """Completes by itself, as NCCL's does. gloo's only completes while it is waited for."""

    def __init__(self, work: Any) -> None:
        self._work, self._error = work, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work.wait(timedelta(seconds=CALL_S))
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
