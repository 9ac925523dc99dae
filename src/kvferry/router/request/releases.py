"""Tells prefill instances that nobody will fetch a hand-off, so that they free its blocks now.

Owns the tasks that do it: they outlive the request, and end with the app. A lost release costs memory until the lease
is over, and nothing else; so each is tried once, and too many at once are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from kvferry.core.errors import TransferError
from kvferry.core.keys import Purpose
from kvferry.http.headers import KEY_HEADERS, RawHeaders
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Instance
from kvferry.router.metrics import Metrics

logger = logging.getLogger(__name__)

RELEASE_PATH = "/kvferry/release"
NO_MODEL = "kvferry-release"
"""A model that no server serves."""

_MAX_AT_ONCE = 1024
_FEW = 32


class Releases:
    """Sends releases in the background, within a task group that the app owns."""

    def __init__(self, connections: Connections, metrics: Metrics, timeout_s: float) -> None:
        self._connections, self._metrics, self._timeout_s = connections, metrics, timeout_s
        self._group: asyncio.TaskGroup | None = None
        self.num_running = 0

    def open(self, group: asyncio.TaskGroup) -> None:
        """Run in `group` from now on."""
        self._group = group

    def start(self, prefill: Instance, transfer_id: str) -> None:
        """Tell a prefill instance of kvferry's to end a hand-off. Returns at once."""
        self._begin(prefill, RELEASE_PATH, _released(transfer_id), [], expected=200)

    async def send_all(self, held: Sequence[tuple[Instance, str]]) -> None:
        """Send all of these as `start` does, a few at a time, as there may be thousands, and wait for it. No instance
        waits for another."""
        by_instance: dict[Instance, list[tuple[Instance, str]]] = {}
        for one in held:
            by_instance.setdefault(one[0], []).append(one)
        await asyncio.gather(*map(self._one_by_one, by_instance.values()))

    async def _one_by_one(self, held: Sequence[tuple[Instance, str]]) -> None:
        for begin in range(0, len(held), _FEW):
            few = held[begin : begin + _FEW]
            sent = [self._send(one, RELEASE_PATH, _released(name), [], expected=200) for one, name in few]
            self.num_running += len(sent)
            await asyncio.gather(*sent)

    def refuse(self, decode: Instance, ticket: msgspec.Raw, client_headers: RawHeaders) -> None:
        """Release a hand-off of a vLLM prefill instance through a decode instance that has never seen the ticket.
        Returns at once.

        vLLM has no other way: a decode server that refuses a request, here because of its model name, hands the ticket
        to its connector, which gives it up at P.
        """
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": ticket}
        allowed = [(name, value) for name, value in client_headers if name in KEY_HEADERS]
        self._begin(decode, "/v1/completions", msgspec.json.encode(body), allowed, expected=404)

    def _begin(self, instance: Instance, path: str, body: bytes, headers: RawHeaders, expected: int) -> None:
        if self._group is None or self.num_running >= _MAX_AT_ONCE:
            self._metrics.released("dropped")
            return
        self.num_running += 1
        self._group.create_task(self._send(instance, path, body, headers, expected))

    async def _send(self, instance: Instance, path: str, body: bytes, headers: RawHeaders, expected: int) -> None:
        try:
            purpose: Purpose | None = "release" if path == RELEASE_PATH else None
            status, _ = await self._connections.ask(instance, "POST", path, self._timeout_s, body, headers, purpose)
            self._metrics.released("done" if status == expected else "failed")
        except TransferError as error:
            logger.info("a hand-off is left to its lease: %s", error)
            self._metrics.released("failed")
        except Exception:
            # The edge: a release that fails must not end the task group, and with it the router.
            logger.exception("a hand-off is left to its lease")
            self._metrics.released("failed")
        finally:
            self.num_running -= 1


def _released(transfer_id: str) -> bytes:
    return msgspec.json.encode({"transfer_id": transfer_id})
