"""All legs that are under way, and the router's own requests to instances.

Sends legs, and gives up those that have waited too long. A long prefill, or a long queue before it, is no reason to
give a request up: an instance that makes progress is waited for, one that hangs is not. Progress is shown by bytes of
any answer, and by the instance's step counter, which is read when there have been no bytes for a while.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, TransferError, TransferTimeout
from kvferry.core.keys import Purpose
from kvferry.http.client import HttpClient
from kvferry.http.config import HttpConfig, InstanceAccess
from kvferry.http.errors import AnswerTimeout
from kvferry.http.headers import RawHeaders
from kvferry.http.signed_client import SignedClient, bearer
from kvferry.router.config import RouterConfig
from kvferry.router.headers import JSON
from kvferry.router.instance import Instance
from kvferry.router.leg import Leg, Patience
from kvferry.router.work import Work

logger = logging.getLogger(__name__)

_IDLE_CONNECTION_S = 1.0
"""Far less than the 5 s after which uvicorn, and so vLLM, closes an idle connection: on a busy machine the two ends
disagree by seconds about when it became idle."""

_LONGEST_OWN_ANSWER = 2**20
"""Bytes of an answer to a question of the router's own."""

OPEN, ALONE = InstanceAccess(), HttpConfig()

_KEYLESS = frozenset({"/health", "/version", "/query"})
"""Open to all at every engine, and so asked without any key."""

_SLOWEST_PREFILL = 1000
"""Bytes of a request's body for which an instance has one second more to begin its answer: not every engine computes a
prompt in steps that can be counted."""

_LONGEST_SWEEP_S = 1.0
_CONNECT_S = 5.0
"""To wait for a connection to an instance."""
_STEPS = re.compile(rb"^(?:kvferry:engine_steps_total|vllm:iteration_tokens_total_count)(?:\{[^\n]*\})? (\S+)$", re.M)
"""How many steps an engine has made, in the metrics of kvferry and of vLLM."""


class Legs:
    """An asynchronous context manager. Its errors are `TransferError`s that name the instance, not its address."""

    def __init__(
        self, config: RouterConfig, clock: Clock, access: InstanceAccess = OPEN, http: HttpConfig = ALONE
    ) -> None:
        self.now = clock.monotonic
        self._first_byte_s, self._total_s = config.first_byte_timeout_s, config.answer_timeout_s
        silence_s = config.between_bytes_timeout_s
        self.between_bytes = Patience(silence_s, max(self._total_s, silence_s), movable=False)
        """Of an answer that has begun."""
        self._silence_s = min(config.first_byte_timeout_s, silence_s)
        key = access.instance_api_key
        self.authorization: RawHeaders = [] if key is None else [bearer(key)]
        """For the legs of clients, in place of the client's own; empty: the client's own goes on."""
        self._http = HttpClient(
            access.tls_context(http.tls_ca), idle_s=_IDLE_CONNECTION_S, fast_path=True, who="the router"
        )
        self._signed = SignedClient(self._http, http.secret, key)
        self._open: set[Leg] = set()
        self._steps: dict[Instance, bytes] = {}
        self._asking: set[Instance] = set()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    @property
    def num_open(self) -> int:
        """How many legs wait for bytes."""
        return len(self._open)

    def send(
        self,
        instance: Instance,
        method: str,
        target: str,
        headers: bytes,
        body: bytes | None,
        on_change: Callable[[Leg], None],
        *,
        uncached: int = 0,
        computes: bool = False,
        decodes: bool = False,
        beside: Instance | None = None,
    ) -> Leg:
        """Send a leg, with these lines of headers. `uncached`, `computes`, `decodes`: as in `Work`; `beside`: as in
        `Patience`. `on_change` is called in the event loop
        whenever the leg's state changes. Raises `InvalidRequest` for what cannot be sent."""
        silence_s = self._first_byte_s + (0 if body is None else len(body) / _SLOWEST_PREFILL)
        patience = Patience(silence_s, max(self._total_s, silence_s), beside=beside)
        try:
            call = self._http.start(
                instance.origin,
                method,
                instance.base_path + target,
                headers,
                body,
                connect_s=_CONNECT_S,
                repeatable=True,  # nothing had come of it
            )
        except ValueError as error:
            raise InvalidRequest(f"the request cannot be sent on: {error}") from error
        work = Work(instance.load, uncached, self.now(), computes=computes, decodes=decodes)
        leg = Leg(self, instance, call, patience, work, on_change)
        self._open.add(leg)
        return leg

    def forget(self, leg: Leg) -> None:
        """The leg is over."""
        self._open.discard(leg)

    def close_connections(self, instance: Instance) -> None:
        """The instance is gone for good."""
        self._http.forget(instance.origin)
        self._signed.forget(instance.origin)

    async def ask(
        self,
        instance: Instance,
        method: str,
        target: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: RawHeaders | None = None,
        purpose: Purpose | None = None,
    ) -> tuple[int, bytes]:
        """A request of the router's own: status and body. `headers`: a client's authorization, for where the router was
        given none for the instances. With a `purpose` it is signed, if the instance is of this deployment. Raises
        `TransferError`, of which `TransferTimeout` is one."""
        sent: RawHeaders = [] if body is None else [JSON]
        origin, path = instance.origin, instance.base_path
        limits: dict[str, Any] = {"timeout_s": timeout_s, "body": body, "max_bytes": _LONGEST_OWN_ANSWER}
        try:
            if purpose is not None:
                asked = self._signed.ask(
                    origin, method, target, purpose=purpose, headers=sent, base_path=path, **limits
                )
            else:
                sent += [] if target in _KEYLESS else self.authorization or headers or []
                asked = self._http.ask(origin, method, path + target, headers=sent, **limits)
            status, _, answer = await asked
        except AnswerTimeout as error:
            raise TransferTimeout(f"{instance} did not answer {target} within {timeout_s:g} s") from error
        return status, answer

    async def metrics(self, instance: Instance, timeout_s: float) -> tuple[int, bytes]:
        """Its answer to GET /metrics."""
        return await self.ask(instance, "GET", "/metrics", timeout_s, purpose="probe")

    # Legs that wait too long.

    async def watch(self) -> None:
        """Give up legs that have waited too long; runs until it is cancelled."""
        sweep_s = min(_LONGEST_SWEEP_S, self._silence_s / 4)
        async with asyncio.TaskGroup() as group:
            before = self.now()
            while True:
                await asyncio.sleep(sweep_s)
                late_s = self.now() - before - sweep_s
                self.look(missed_s=late_s if late_s > sweep_s else 0.0)
                before = self.now()
                for instance in self._quiet() - self._asking:
                    self._asking.add(instance)
                    group.create_task(self._look_for_steps(instance))

    def look(self, missed_s: float = 0.0) -> None:
        """Give up what has waited too long. `missed_s`: how long this process itself stood still, and could not see any
        progress: what came meanwhile has not been read yet."""
        now = self.now()
        if missed_s:
            for leg in self._open:
                leg.progress_at = min(now, leg.progress_at + missed_s)
            for instance in self._waited_for():
                instance.last_sign = min(now, instance.last_sign + missed_s)
        for leg in tuple(self._open):
            leg.look(now)

    def _waited_for(self) -> set[Instance]:
        return {one for leg in self._open for one in (leg.instance, leg.patience.beside) if one is not None}

    def _quiet(self) -> set[Instance]:
        """The instances whose step counter to read: those that have shown no progress for a while."""
        now, waited_for = self.now(), self._waited_for()
        quiet = [leg for leg in self._open if leg.silent_for(now) > self._silence_s / 4]
        self._steps = {one: steps for one, steps in self._steps.items() if one in waited_for}
        return {one for leg in quiet for one in (leg.instance, leg.patience.beside) if one is not None}

    async def _look_for_steps(self, instance: Instance) -> None:
        try:
            status, text = await self.metrics(instance, self._silence_s / 2)
        except TransferError:
            return
        except Exception:
            # The edge of this room: the router goes on, whatever an instance calls its metrics.
            logger.exception("%s: its metrics could not be read", instance)
            return
        finally:
            self._asking.discard(instance)
        steps = b" ".join(_STEPS.findall(text)) if status == 200 else b""
        if self._steps.get(instance, steps) != steps:
            instance.last_sign = self.now()
        self._steps[instance] = steps
