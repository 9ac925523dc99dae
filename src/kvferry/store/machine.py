"""Machine resources of stores and connectors: threads, event loops, files and shared memory.

The builder of a connector chooses the machine (`ConnectorContext.machine`). A simulation gives each simulated process
its own, whose threads take virtual time and whose files exist only in memory (`kvferry.sim.machine`).
"""

from __future__ import annotations

from kvferry.store.arena import Arena
from kvferry.store.disk import DISK, Disk
from kvferry.store.threads import Threads
from kvferry.transport.transfer_loop import TransferLoop


class Machine:
    """The machine on which this process runs."""

    disk: Disk = DISK
    min_deadline_s: float = 0.0
    """Minimum seconds of the deadline of one call to a store, and of the wait for a producer's heartbeat. More than 0
    where other work keeps this machine so busy that a late answer does not mean a failure."""

    def threads(self, number: int, name: str, *, moves_blocks: bool = True) -> Threads:
        """At most `number` threads for calls that block. `moves_blocks` False: the calls take very little time, if they
        return."""
        return Threads(number, name)

    def transfer_loop(self, name: str) -> TransferLoop:
        """A thread with an event loop, which is not started yet."""
        return TransferLoop(name)

    def arena(self, name: str, num_bytes: int) -> Arena:
        """Memory that the processes of this machine share under a name. May block. Raises `ConfigError`."""
        return Arena(name, num_bytes)


MACHINE = Machine()
"""This machine."""
