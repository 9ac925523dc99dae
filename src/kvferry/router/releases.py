"""Tells prefill instances that nobody will come for a hand-off, so that they free its blocks now.

Owns the tasks that do it: they outlive the request, and end with the app. A release that is lost costs memory until
the lease is over, never more; so each has one try, and too many at once are dropped.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvferry.core.errors import TransferError
from kvferry.http.headers import RawHeaders
from kvferry.router.instance import Instance
from kvferry.router.metrics import Metrics
from kvferry.router.upstream import Upstream

logger = logging.getLogger(__name__)

RELEASE_PATH = "/kvferry/release"
NO_MODEL = "kvferry-release"
"""A model that no server serves."""

_MOST_AT_ONCE = 1024


class Releases:
    """Sends releases in the background, within a task group that the app owns."""

    def __init__(self, upstream: Upstream, metrics: Metrics, timeout_s: float) -> None:
        self._upstream, self._metrics, self._timeout_s = upstream, metrics, timeout_s
        self._group: asyncio.TaskGroup | None = None
        self._num_running = 0

    def open(self, group: asyncio.TaskGroup) -> None:
        """Run in `group` from now on."""
        self._group = group

    def start(self, prefill: Instance, transfer_id: str) -> None:
        """Tell a prefill instance of kvferry's to end a hand-off. Returns at once."""
        self._begin(prefill, RELEASE_PATH, {"transfer_id": transfer_id}, [], expected=200)

    def refuse(self, decode: Instance, ticket: msgspec.Raw, client_headers: RawHeaders) -> None:
        """Have vLLM's prefill instance told by a decode instance, which has never seen the ticket. Returns at once.

        vLLM has no other way: a decode server that refuses a request, here for its model's name, hands the ticket to
        its connector, and that gives it up at P.
        """
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": ticket}
        allowed = [(name, value) for name, value in client_headers if name == b"authorization"]
        self._begin(decode, "/v1/completions", body, allowed, expected=404)

    def _begin(self, instance: Instance, path: str, body: object, headers: RawHeaders, expected: int) -> None:
        if self._group is None or self._num_running >= _MOST_AT_ONCE:
            self._metrics.released("dropped")
            return
        self._num_running += 1
        self._group.create_task(self._send(instance, path, msgspec.json.encode(body), headers, expected))

    async def _send(self, instance: Instance, path: str, body: bytes, headers: RawHeaders, expected: int) -> None:
        try:
            status, _ = await self._upstream.ask(instance, "POST", path, self._timeout_s, body, headers)
            self._metrics.released("done" if status == expected else "failed")
        except TransferError as error:
            logger.info("a hand-off is left to its lease: %s", error)
            self._metrics.released("failed")
        except Exception:
            # The edge: a release that fails must not end the task group, and with it the router.
            logger.exception("a hand-off is left to its lease")
            self._metrics.released("failed")
        finally:
            self._num_running -= 1
