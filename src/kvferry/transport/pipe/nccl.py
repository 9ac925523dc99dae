"""A pipe over NCCL: from one GPU's memory into another's. Never run: written without a machine of two GPUs.

NCCL joins two different GPUs: the prefill and the decode instance each need their own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.transport.pipe.base import PipeSettings
from kvferry.transport.pipe.process_group import RECEIVER, SENDER, ProcessGroupPipe
from kvferry.transport.pipe.rendezvous import Rendezvous

POLL_S = 50e-6


class NcclPipe(ProcessGroupPipe):
    """Joins two GPUs that NCCL can connect. Never run."""

    name = "nccl"

    def __init__(self, settings: PipeSettings) -> None:
        super().__init__(settings)
        if not torch.cuda.is_available() or not dist.is_available() or not dist.is_nccl_available():
            raise ConfigError(
                "pipe nccl needs an NVIDIA GPU and a PyTorch with NCCL, which this machine does not have; set"
                " kv_connector_extra_config.transport to auto (or gloo) on both instances"
            )
        wanted = torch.device(settings.device if settings.device.startswith("cuda") else "cuda")
        self.device = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)

    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        """Make the group, and connect it by a first transfer: otherwise NCCL would use the store during the first
        tensor."""
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, rank, 2, options)
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        (self.send if rank == SENDER else self.receive)(group, token, timeout_s)
        return group

    def send(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Returns when the GPU has sent the bytes."""
        self._wait(group.send([data], RECEIVER, 0), timeout_s)

    def receive(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Returns when the bytes are in the GPU's memory."""
        self._wait(group.recv([data], SENDER, 0), timeout_s)

    def _wait(self, work: Any, timeout_s: float) -> None:
        """Polled, since NCCL's own wait only orders streams."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        while not work.is_completed():
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise RuntimeError("timed out waiting for NCCL")
            time.sleep(POLL_S)
        work.wait()

    def discard(self, group: Any) -> None:
        """Abort the group, with a call that is under way."""
        group.abort()
