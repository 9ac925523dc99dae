"""Releases hand-offs that no instance will fetch, so that prefill instances free their blocks now.

Owns the tasks that send the releases: they outlive the request, and end with the app. A lost release only costs memory
until the lease expires; so each is tried once, and dropped if too many run.
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
"""Name of a model that no server serves."""

_BATCH_SIZE = 32


class Releases:
    """Sends releases in the background, within a task group that the app owns."""

    max_concurrent = 1024

    def __init__(self, connections: Connections, metrics: Metrics, timeout_s: float) -> None:
        self._connections, self._metrics, self._timeout_s = connections, metrics, timeout_s
        self._group: asyncio.TaskGroup | None = None
        self.num_running = 0

    def open(self, group: asyncio.TaskGroup) -> None:
        """Run the tasks in `group` from now on."""
        self._group = group

    def start(self, prefill: Instance, transfer_id: str) -> None:
        """Send a release to one of kvferry's prefill instances. Returns at once."""
        self._begin(prefill, RELEASE_PATH, _release_body(transfer_id), [], expected=200)

    async def send_all(self, held: Sequence[tuple[Instance, str]]) -> None:
        """Send these releases in small batches, because there may be thousands, and wait for them. Instances do not
        wait for each other."""
        by_instance: dict[Instance, list[tuple[Instance, str]]] = {}
        for hand_off in held:
            by_instance.setdefault(hand_off[0], []).append(hand_off)
        await asyncio.gather(*map(self._send_batches, by_instance.values()))

    async def _send_batches(self, held: Sequence[tuple[Instance, str]]) -> None:
        for begin in range(0, len(held), _BATCH_SIZE):
            batch = held[begin : begin + _BATCH_SIZE]
            sent = [
                self._send(instance, RELEASE_PATH, _release_body(transfer_id), [], expected=200)
                for instance, transfer_id in batch
            ]
            self.num_running += len(sent)
            await asyncio.gather(*sent)

    def release_through(self, decode: Instance, ticket: msgspec.Raw, client_headers: RawHeaders) -> None:
        """Release a hand-off of a vLLM prefill instance through a decode instance that has never seen the ticket.
        Returns at once.

        vLLM has no other way: a decode server that refuses a request, in this case because of its model name, gives
        the ticket to its connector, which releases it at P.
        """
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": ticket}
        allowed = [(name, value) for name, value in client_headers if name in KEY_HEADERS]
        self._begin(decode, "/v1/completions", msgspec.json.encode(body), allowed, expected=404)

    def _begin(self, instance: Instance, path: str, body: bytes, headers: RawHeaders, expected: int) -> None:
        if self._group is None or self.num_running >= self.max_concurrent:
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
            # A release that fails must not end the task group, which would end the router.
            logger.exception("a hand-off is left to its lease")
            self._metrics.released("failed")
        finally:
            self.num_running -= 1


def _release_body(transfer_id: str) -> bytes:
    return msgspec.json.encode({"transfer_id": transfer_id})
