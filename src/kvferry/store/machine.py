"""What stores and connectors use of the machine they run on: threads, event loops, files and shared memory.

Whoever builds a connector says which machine that is (`ConnectorContext.machine`). A simulation gives each simulated
process one of its own, whose threads take virtual time and whose files are nowhere (`kvferry.sim.machine`).
"""

from __future__ import annotations

from kvferry.store.arena import Arena
from kvferry.store.disk import DISK, Disk
from kvferry.store.threads import Threads
from kvferry.transport.transfer_loop import TransferLoop


class Machine:
    """The machine on which this process runs."""

    disk: Disk = DISK

    def threads(self, number: int, name: str, *, moves_blocks: bool = True) -> Threads:
        """At most `number` threads for calls that block. `moves_blocks` false: the calls take no time worth speaking
        of, if they return at all."""
        return Threads(number, name)

    def transfer_loop(self, name: str) -> TransferLoop:
        """A thread with an event loop, which is not started yet."""
        return TransferLoop(name)

    def arena(self, name: str, num_bytes: int) -> Arena:
        """Memory that the processes of this machine share under a name. May block. Raises `ConfigError`."""
        return Arena(name, num_bytes)


MACHINE = Machine()
"""This machine."""
