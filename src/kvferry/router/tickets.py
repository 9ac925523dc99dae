"""The hand-offs of one request for which prefill instances may hold blocks. Owns the list; what is left on it at the
end is released."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvferry.core.secret_hex import secret_hex
from kvferry.http.headers import RawHeaders
from kvferry.router.instance import Absent, Instance, SglangFacts, VllmFacts
from kvferry.router.pools import RolePool
from kvferry.router.releases import Releases


@dataclass
class _Held:
    """A hand-off for which `prefill` may hold blocks. `ticket` is D's, once it is known; `given`: D has it."""

    prefill: Instance
    ticket: msgspec.Raw | None = None
    given: bool = False


class Tickets:
    """Of one request, by transfer id."""

    def __init__(self, releases: Releases, decodes: RolePool) -> None:
        self._releases, self._decodes = releases, decodes
        self._held: dict[str, _Held] = {}
        self._fetching: str | None = None

    def open(self, prefill: Instance) -> str:
        """A new transfer id, for which `prefill` may hold blocks from now on."""
        transfer_id = secret_hex()
        self._held[transfer_id] = _Held(prefill)
        prefill.num_tickets += 1
        return transfer_id

    def received(self, transfer_id: str, ticket: msgspec.Raw) -> None:
        """P answered with this ticket, with which D can fetch."""
        if transfer_id in self._held:
            self._held[transfer_id].ticket = ticket

    def settle(self, transfer_id: str) -> None:
        """P holds nothing for it: the hand-off never began, or D has all of it."""
        held = self._held.pop(transfer_id, None)
        if held is not None:
            held.prefill.num_tickets -= 1

    def give(self, transfer_id: str) -> None:
        """A decode instance gets the ticket and will fetch with it or give it up."""
        if transfer_id in self._held:
            self._held[transfer_id].given = True

    def take_back(self, transfer_id: str) -> None:
        """That decode instance is lost."""
        if transfer_id in self._held:
            self._held[transfer_id].given = False

    def fetching(self, transfer_id: str) -> None:
        """The answer for the client comes from this ticket."""
        self._fetching = transfer_id

    def delivered(self) -> None:
        """The client has all of D's answer, so D has fetched all that P kept for it, or has given it up."""
        if self._fetching is not None:
            self.settle(self._fetching)

    def release_all(self, client_headers: RawHeaders) -> None:
        """Have P free what nobody fetched. Does not block."""
        for transfer_id, held in self._held.items():
            self._release(transfer_id, held, client_headers)
            held.prefill.num_tickets -= 1
        self._held.clear()

    def _release(self, transfer_id: str, held: _Held, client_headers: RawHeaders) -> None:
        if isinstance(held.prefill.facts, VllmFacts):
            decode = self._decodes.pick()
            if held.ticket is not None and not held.given and decode is not None:
                self._releases.refuse(decode, held.ticket, client_headers)
        elif not isinstance(held.prefill.facts, Absent | SglangFacts):  # SGLang's ends with its connection
            self._releases.start(held.prefill, transfer_id)
