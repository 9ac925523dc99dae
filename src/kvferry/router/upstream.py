"""Legs to instances: their limits, how they are counted, and what an instance is held to when one fails.

Every error is a `TransferError` that names the instance, not its address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, TransferError, TransferTimeout
from kvferry.http import answer as http
from kvferry.http.client import ClientConfig, Deadlines, HttpClient
from kvferry.http.config import InstanceAccess
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.keys import bearer
from kvferry.http.response import Response
from kvferry.router.config import RouterConfig
from kvferry.router.errors import Silent
from kvferry.router.headers import JSON, PROGRESS, content_type
from kvferry.router.instance import Instance
from kvferry.router.watchdog import Wait, Watchdog

_IDLE_CONNECTION_S = 1.0
"""Far less than the 5 s after which uvicorn, and so vLLM, closes an idle connection: on a busy machine the two ends
disagree by seconds about when it became idle."""

_LONGEST_OWN_ANSWER = 2**20
"""Bytes of an answer to a question of the router's own."""

OPEN = InstanceAccess()

_SLOWEST_PREFILL = 1000
"""Bytes of a request's body for which an instance has one second more to begin its answer: not every engine computes a
prompt in steps that can be counted."""


class Answer:
    """An instance's answer: status and headers are there, and its first bytes, if it has any.

    Whoever has it reads it once, by `read` or `relay`, and in any case calls `close`. Both raise `PeerLost` when the
    answer breaks off, `Silent` when it stops.
    """

    def __init__(
        self, instance: Instance, answer: http.Answer, watchdog: Watchdog, wait: Wait, on_close: Callable[[], None]
    ) -> None:
        self.instance = instance
        self._answer, self._watchdog, self._wait, self._on_close = answer, watchdog, wait, on_close
        wait.received = answer.progress

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._answer.status

    @property
    def headers(self) -> RawHeaders:
        """Names in lower case."""
        return self._answer.headers

    @property
    def is_event_stream(self) -> bool:
        """Whether it comes as server-sent events that one can be added to."""
        return self._answer.is_event_stream and content_type(self.headers) == b"text/event-stream"

    @property
    def is_marked(self) -> bool:
        """Whether its events say how far the answer has come (`core.continuation`)."""
        return self.status == 200 and self.is_event_stream and find_header(self.headers, PROGRESS) is not None

    def read_now(self, max_bytes: int) -> bytes | None:
        """As `read`, where all of the body is here; None: wait for it."""
        with _Named(self.instance):
            return self._answer.read_now(max_bytes)

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PeerLost` when it is longer than `max_bytes`, too."""
        with _Named(self.instance):
            return await self._watchdog.within(self._wait, self._answer.read(max_bytes))

    async def relay(self, response: Response, mask: Callable[[bytes], bytes] | None = None) -> None:
        """Pass the body on to a response that has begun, and end it. `mask` may change bytes, not how many they are."""
        if self._answer.relay_now(response, mask):
            return
        with _Named(self.instance), self._noted():
            await self._watchdog.within(self._wait, self._answer.relay(response, mask))

    async def relay_payload(self, response: Response, take: Callable[[bytes], bytes]) -> None:
        """Write what `take` makes of the body, of which another instance can give the rest, to a response that has
        begun, and leave that open. What `take` raises is not held against the instance: it has not broken off."""
        self._wait.movable = True
        refused: list[BaseException] = []

        def taken(payload: bytes) -> bytes:
            try:
                return take(payload)
            except TransferError as error:
                refused.append(error)
                raise

        with _Named(self.instance), self._noted(refused):
            await self._watchdog.within(self._wait, self._answer.relay_payload(response, taken))

    @contextmanager
    def _noted(self, refused: Sequence[BaseException] = ()) -> Iterator[None]:
        """An instance that broke off may be another process when it is back."""
        try:
            yield
        except TransferError:
            if not refused:
                self.instance.failed(reachable=True)
            raise

    def close(self) -> None:
        """Give the connection back if the answer was read to its end; else cut it, so that the instance stops."""
        self._answer.close()
        self._on_close()


class Upstream:
    """An HTTP client for instances; an asynchronous context manager."""

    def __init__(
        self, config: RouterConfig, clock: Clock, access: InstanceAccess = OPEN, fleet_keys: Sequence[str] = ()
    ) -> None:
        self._config, self._key = config, access.instance_api_key
        self._watchdog = Watchdog(clock, min(config.first_byte_timeout_s, config.between_bytes_timeout_s))
        self._http = HttpClient(ClientConfig(idle_s=_IDLE_CONNECTION_S), access.tls_context())
        self._deadlines = Deadlines(connect_s=config.connect_timeout_s)
        self._own_headers = [bearer(key) for key in (access.instance_api_key, *fleet_keys) if key][:1]

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def watch(self) -> None:
        """End legs that wait too long; runs until it is cancelled."""
        await self._watchdog.run(self._metrics)

    @property
    def num_waits(self) -> int:
        """How many legs wait for bytes."""
        return self._watchdog.num_waits

    def wait_for(self, instance: Instance, body: bytes | None, beside: Instance | None = None) -> Wait:
        """The limits of a leg with this body. `beside`: as in `Wait`."""
        config = self._config
        silence_s = config.first_byte_timeout_s + len(body or b"") / _SLOWEST_PREFILL
        return Wait(instance, silence_s, max(config.answer_timeout_s, silence_s), beside=beside)

    async def open(
        self, instance: Instance, method: str, target: str, headers: RawHeaders, body: bytes | None, wait: Wait
    ) -> Answer:
        """A client's leg: send the request and wait for the answer's first bytes, within the limits of `wait`.

        Cancelling it cuts the connection. Raises `Unreachable`, `Silent` or `PeerLost`, and notes that on the instance.
        """
        if self._key is not None:
            headers = [*(one for one in headers if one[0] != b"authorization"), bearer(self._key)]
        leg = _LegCount(instance)
        try:
            with _Named(instance):
                answer = await self._watchdog.within(wait, self._send(instance, method, target, headers, body))
        except PeerLost as error:
            leg.end()
            instance.failed(reachable=not isinstance(error, Unreachable))
            raise
        except BaseException:
            leg.end()
            raise
        silence_s = self._config.between_bytes_timeout_s
        after = Wait(instance, silence_s, max(self._config.answer_timeout_s, silence_s), movable=False)
        return Answer(instance, answer, self._watchdog, after, leg.end)

    async def _send(
        self, instance: Instance, method: str, target: str, headers: RawHeaders, body: bytes | None
    ) -> http.Answer:
        # A leg may be sent again on a new connection when an idle one turns out to be closed: nothing had come of it.
        answer = await self._http.open(
            instance.origin,
            method,
            instance.base_path + target,
            headers,
            body,
            deadlines=self._deadlines,
            repeatable=True,
        )
        try:
            await answer.ready()
        except BaseException:
            answer.close()
            raise
        return answer

    def forget(self, instance: Instance) -> None:
        """It is gone for good: close the connections to it."""
        self._http.forget(instance.origin)

    async def ask(
        self,
        instance: Instance,
        method: str,
        target: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: RawHeaders | None = None,
    ) -> tuple[int, bytes]:
        """A question of the router's own: status and body. Raises `TransferError`, of which `TransferTimeout`."""
        sent = [*(headers or []), *self._own_headers, *([] if body is None else [JSON])]
        try:
            status, _, answer = await self._http.ask(
                instance.origin,
                method,
                instance.base_path + target,
                timeout_s=timeout_s,
                headers=sent,
                body=body,
                max_bytes=_LONGEST_OWN_ANSWER,
            )
        except AnswerTimeout as error:
            raise TransferTimeout(f"{instance} did not answer {target} within {timeout_s:g} s") from error
        return status, answer

    async def _metrics(self, instance: Instance, timeout_s: float) -> bytes:
        status, body = await self.ask(instance, "GET", "/metrics", timeout_s)
        return body if status == 200 else b""


class _LegCount:
    """Counts a leg on its instance from now until `end`, once."""

    def __init__(self, instance: Instance) -> None:
        self._instance: Instance | None = instance
        instance.in_flight += 1

    def end(self) -> None:
        if self._instance is not None:
            self._instance.in_flight -= 1
            self._instance = None


class _Named:
    """Translates what the HTTP room raises into errors that name the instance by its name."""

    __slots__ = ("_instance",)

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, Silent):
            self._instance.mute = True
        elif isinstance(error, Unreachable | AnswerTimeout):  # Only connecting has a deadline of that room's own.
            raise Unreachable(f"{self._instance} cannot be reached: {error}") from error
        elif isinstance(error, TransferError | ValueError):
            raise PeerLost(f"{self._instance} gave no whole answer: {error}") from error
