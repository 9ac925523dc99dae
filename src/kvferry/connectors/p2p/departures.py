"""The producer's half of the worker side: announces what is computed, and says when blocks are free again.

Owns the hand-offs of this rank that wait for their end. Used from the engine's thread only.

Nothing is announced on the word of a plan. A plan names blocks of requests that run in its step, and they are
announced, layer by layer, when the step has passed the layer: by then every block of it is written, whichever request
of this step or an earlier one computed it, or loaded it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.connectors.p2p.plan import Keep, P2pPlan, Save
from kvferry.transport.lookup_buffer.base import LookupBuffer
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.tasks import call_contained


class Departures:
    """See the module.

    `wait_for_device`: on a device a layer's kernels are still running when it is saved. Then all layers are announced
    at the end of the step, after this wait. None: a layer is announced as it is saved.
    """

    def __init__(
        self, buffer: LookupBuffer, num_layers: int, wait_for_device: Callable[[], None] | None = None
    ) -> None:
        self._buffer, self._table, self._num_layers = buffer, buffer.table, num_layers
        self._wait_for_device = wait_for_device
        self._written: list[int] = []
        self._saves: list[tuple[str, int, list[int]]] = []
        self._held: dict[str, str] = {}
        self._over: set[str] = set()

    def withdraw(self, plan: P2pPlan) -> None:
        """From here on nobody takes what was announced by requests that lost their blocks."""
        for transfer_id in plan.resets:
            self._table.reset(transfer_id)

    def start(self, plan: P2pPlan) -> None:
        """Drop and seal what the plan says; what it wants announced waits for the layers of this step."""
        self.discard()  # of a step that never came to its end
        for transfer_id in plan.voids:
            self._each(transfer_id, partial(self._table.drop, transfer_id))
        for drop in plan.drops:
            self._held[drop.transfer_id] = drop.request_id
            self._each(drop.transfer_id, partial(self._table.drop, drop.transfer_id))
        for transfer_id in plan.ends:
            self._each(transfer_id, partial(self._buffer.end, transfer_id))
        for save in plan.saves:
            self._each(save.transfer_id, partial(self._begin, save))
        for seal in plan.seals:
            self._held[seal.transfer_id] = seal.request_id
            self._each(seal.transfer_id, partial(self._table.seal, seal.transfer_id, seal.meta))
        for keep in plan.keeps:
            self._held[keep.transfer_id] = keep.request_id
            self._each(keep.transfer_id, partial(self._keep, keep))

    def _each(self, transfer_id: str, act: Callable[[], object]) -> None:
        """Do one thing for one hand-off; where that goes wrong the hand-off is withdrawn, and no other."""
        call_contained(act, f"hand-off {transfer_id}", lambda error: self._void(transfer_id))

    def _void(self, transfer_id: str) -> None:
        """Whatever was announced of it, nobody takes it from here on. If even that fails, it ends by its lease."""
        self._saves = [save for save in self._saves if save[0] != transfer_id]
        self._table.drop(transfer_id)
        self._over.add(transfer_id)

    def save_layer(self, layer: int) -> None:
        """This step's blocks of `layer` have their KV, or will when the device has done what it was given."""
        if self._wait_for_device is None:
            self._announce(layer)
        elif self._saves:
            self._written.append(layer)

    def _announce(self, layer: int) -> None:
        for transfer_id, first_block, block_ids in self._saves:
            part = Part(layer, 1, first_block, block_ids)
            self._each(transfer_id, partial(self._table.insert, transfer_id, part))

    def discard(self) -> None:
        """The step has failed, and with it what it was to announce; its requests end."""
        for transfer_id, _, _ in self._saves:
            self._void(transfer_id)
        self._written.clear()
        self._saves.clear()

    def flush(self) -> None:
        """The step is over."""
        if self._wait_for_device is not None and self._written:
            self._wait_for_device()
            for layer in self._written:
                self._announce(layer)
            self._written.clear()
        self._saves.clear()

    def released(self) -> set[str]:
        """Requests whose blocks, held so far, are free again. Each is named once."""
        for ended in self._table.ended():
            self._over.add(ended.key)
        done = self._over & self._held.keys()
        self._over -= done
        return {self._held.pop(transfer_id) for transfer_id in done}

    def is_empty(self) -> bool:
        """Whether nothing waits for its end."""
        return not (self._held or self._over)

    def _begin(self, save: Save) -> None:
        if save.opens and not self._table.open(save.transfer_id):
            self._over.add(save.transfer_id)
        elif save.block_ids:
            self._saves.append((save.transfer_id, save.first_block, save.block_ids))

    def _keep(self, keep: Keep) -> None:
        if not self._table.open(keep.transfer_id):
            self._over.add(keep.transfer_id)
            return
        self._table.insert(keep.transfer_id, Part(0, self._num_layers, 0, keep.block_ids))
        self._table.set_lease(keep.transfer_id, keep.lease_s)
        self._table.seal(keep.transfer_id, keep.meta)
