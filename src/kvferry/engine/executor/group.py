"""The process group of an instance's ranks in `torch.distributed`: gloo on the CPU, NCCL on GPUs (never run so).

The ranks find each other through rank 0 (`store`). On one machine they communicate over the loopback interface, so that
other machines cannot reach them; otherwise over the interface of the address at which the other ranks reach each.
This traffic is neither authenticated nor encrypted.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from kvferry.core.errors import ConfigError
from kvferry.engine.executor.store import RendezvousStore
from kvferry.engine.model.rank_placement import RankPlacement

RENDEZVOUS_S = 60.0
"""Max seconds for the rendezvous, once the processes of all ranks are running."""
LOADING_S = 1800.0
"""Max seconds that a rank waits for another one in a collective while they load, from the same disk."""
STEP_S = 60.0
"""Max seconds that a rank waits for another one in a collective of a step."""


def require_no_process_group() -> None:
    """Raise `ConfigError` if this process is a rank already: `torch.distributed` has one default group per process."""
    if dist.is_initialized():
        raise ConfigError("this process runs a tensor-parallel engine already; give each a process of its own")


@contextmanager
def rendezvous(
    placement: RankPlacement, device: torch.device, store: RendezvousStore, address: str, step_s: float = STEP_S
) -> Iterator[None]:
    """Join the process group through `store`; the other ranks reach this one at `address`. The body, which loads the
    model, may take `LOADING_S`, and a collective after it `step_s`; if it raises, this rank leaves the group."""
    require_no_process_group()
    try:
        with _environment(placement, address):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=placement.rank,
                world_size=placement.size,
                timeout=timedelta(seconds=RENDEZVOUS_S),
                device_id=device if device.type == "cuda" else None,
            )
            _set_pg_timeout(timedelta(seconds=LOADING_S))
            yield
        _set_pg_timeout(timedelta(seconds=step_s))
    except BaseException:
        leave()
        raise


def abort() -> None:
    """Make collectives that wait for a lost rank fail. gloo's do so anyway; NCCL's would wait for their timeout."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def leave() -> None:
    """Leave the process group, if it was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _environment(placement: RankPlacement, address: str) -> Iterator[None]:
    """Set the environment so that new groups listen on the interface of the address only, and transformers finds this
    rank's GPU."""
    interface = _interface(address)
    variables = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "LOCAL_RANK": str(placement.device_index),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _interface(address: str) -> str:
    """The name of the interface with this address; for all loopback addresses, the interface of 127.0.0.1."""
    address = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    raise ConfigError(
        f"--tensor-parallel-size needs an interface with the address {address}, and this machine does not have one"
    )
