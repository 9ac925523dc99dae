"""A pipe over gloo: `torch.distributed` between host memories, TCP inside."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.core.errors import ConfigError
from kvferry.transport.pipe.base import PipeSettings
from kvferry.transport.pipe.process_group import RECEIVER, SENDER, ProcessGroupPipe
from kvferry.transport.pipe.rendezvous import Rendezvous


class GlooPipe(ProcessGroupPipe):
    """Joins any two instances with a network between them; gloo listens on `settings.host`."""

    name = "gloo"
    over_tcp = True
    device = torch.device("cpu")

    def __init__(self, settings: PipeSettings) -> None:
        super().__init__(settings)
        if not dist.is_available() or not dist.is_gloo_available():
            raise ConfigError("pipe gloo needs a PyTorch with torch.distributed and gloo; use transport tcp")

    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        """Make the group; it is connected when this returns."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.settings.host)]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Returns when gloo has sent the bytes."""
        group.send([data], RECEIVER, 0).wait(timedelta(seconds=timeout_s))

    def receive(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Returns when the bytes are here."""
        group.recv([data], SENDER, 0).wait(timedelta(seconds=timeout_s))

    def discard(self, group: Any) -> None:
        """Nothing to do: its connections are closed with the last reference to it."""
