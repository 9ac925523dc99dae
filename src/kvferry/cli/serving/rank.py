"""`kvferry rank`: one further rank of an instance, which may be on another machine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from kvferry.cli.common import LOG, LogFlags, ReadyFd
from kvferry.cli.flags import complete
from kvferry.core.keys import shared_token
from kvferry.core.settings.addresses import parse_address
from kvferry.fleet.processes.process_settings import JoiningRankProcess
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.processes.running import NullReporter, run_process
from kvferry.observe.logs import LogConfig, set_up_logging

RankAddress = Annotated[str, Parameter(help="What the instance was given as --ranks-at.")]


def rank(address: RankAddress, /, *, log: LogFlags = LOG, ready_fd: ReadyFd = None) -> int:
    """Start one further rank of an instance, on this machine or another one; it ends with the instance.

    The instance waits for the rank at an address that this machine can reach, and tells it what to load. Both need the
    same KVFERRY_AUTH_TOKEN, the same versions of kvferry and torch, and the model under the same path:

        kvferry decode MODEL --tensor-parallel-size 2 --ranks-at 10.0.0.1:7000

        kvferry rank 10.0.0.1:7000
    """
    shared_token("kvferry rank")
    parse_address(address, "the address of the instance")
    process = JoiningRankProcess(address=address, log=complete(LogConfig, log))
    set_up_logging(process.log, "rank")
    return run_process(process, NullReporter() if ready_fd is None else ReadyWriter(ready_fd))
