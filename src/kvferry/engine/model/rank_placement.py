"""The share of a model that a process holds: one of an instance's tensor-parallel ranks, or all of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import num_cpus

if TYPE_CHECKING:
    from kvferry.engine.config import EngineConfig


def default_num_threads() -> int:
    """CPU threads of all ranks that share this machine: torch's number from OMP_NUM_THREADS, or else at most the CPUs
    that this process, or its container, may use."""
    number = torch.get_num_threads()
    return number if "OMP_NUM_THREADS" in os.environ else min(number, num_cpus())


@dataclass(frozen=True)
class RankPlacement:
    """Tensor-parallel rank `rank` of `size`; without arguments, the only one. `shares_machine`: all ranks are on one
    machine, and divide its devices and CPU threads; otherwise each uses the ones that its process sees."""

    rank: int = 0
    size: int = 1
    shares_machine: bool = True

    @classmethod
    def of_rank(cls, rank: int, config: EngineConfig) -> RankPlacement:
        """The placement of a rank of an engine with this configuration."""
        return cls(rank, config.tensor_parallel_size, config.ranks_at is None)

    @property
    def device_index(self) -> int:
        """The index of this rank's device among the devices that its process sees."""
        return self.rank if self.shares_machine else 0

    def choose_device(self, name: str) -> torch.device:
        """The device that `auto`, `cpu` or `cuda` means on this rank. Raises `ConfigError` if there is none."""
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: PyTorch finds no GPU; use --device cpu, or install a CUDA build")
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name) if self.size == 1 else self._device_of_rank(name)

    def _device_of_rank(self, name: str) -> torch.device:
        if name == "cpu":
            if torch.accelerator.is_available():
                raise ConfigError(
                    "--tensor-parallel-size with --device cpu: transformers shards for the GPU that it sees; hide"
                    " it with CUDA_VISIBLE_DEVICES="
                )
            return torch.device("cpu")
        if self.shares_machine and torch.cuda.device_count() < self.size:
            raise ConfigError(
                f"--tensor-parallel-size {self.size} needs as many GPUs; PyTorch finds {torch.cuda.device_count()}"
            )
        return torch.device("cuda", self.device_index)

    def set_num_threads(self, num_threads: int | None) -> None:
        """Set torch's number of threads to this rank's share. `num_threads`: for all ranks together; None:
        `default_num_threads`. Raises `ConfigError`."""
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"--num-threads must be at least 1, got {num_threads}")
        number = num_threads or default_num_threads()
        if num_threads is not None or self.shares_machine:
            number = max(1, number // self.size)
        if number != torch.get_num_threads():
            torch.set_num_threads(number)

    def any_rank(self, needed: bool, device: torch.device) -> bool:
        """True if `needed` is true on any rank. All ranks call it together."""
        if self.size == 1:
            return needed
        flag = torch.tensor([int(needed)], device=device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def shared_name(self, name: str, device: torch.device) -> str:
        """A common name of all ranks, computed from each rank's `name`. All ranks call it together."""
        if self.size == 1:
            return name
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        numbers = torch.zeros(self.size, dtype=torch.int64, device=device)
        numbers[self.rank] = number
        torch.distributed.all_reduce(numbers)
        return f"{self.size} ranks {hashlib.sha256(repr(numbers.tolist()).encode()).hexdigest()[:16]}"

    def load_options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that load this rank's share only. The process group must exist
        (`executor.group`)."""
        if self.size == 1:
            return {}
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.size)}
