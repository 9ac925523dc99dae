"""Legs to instances: their time limits, how they are counted, and the consequences for an instance when one fails.

Every error is a `TransferError` that names the instance, not its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, TransferError, TransferTimeout
from kvferry.http import answer as http
from kvferry.http.client import ClientConfig, Deadlines, HttpClient, Sent
from kvferry.http.config import InstanceAccess
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.headers import RawHeaders
from kvferry.http.keys import bearer
from kvferry.http.response import Response
from kvferry.router.config import RouterConfig
from kvferry.router.errors import Silent, UnreadableStream
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


class UpstreamAnswer:
    """An instance's answer: status and headers are there, and the first bytes of its body, if it has any.

    Its user reads it once, by `read` or `relay`, and calls `close` in any case. Both raise `PeerLost` if the connection
    breaks, and `Silent` if the instance stops sending. Until `close`, the leg counts as in flight on its instance.
    """

    def __init__(self, instance: Instance, answer: http.Answer, watchdog: Watchdog, wait: Wait) -> None:
        self.instance = instance
        self.status, self.headers, first = answer.status, answer.headers, answer.first
        """The HTTP status; names of headers in lower case."""
        self.is_event_stream = answer.is_event_stream and content_type(answer.headers) == b"text/event-stream"
        """Whether it is a stream of server-sent events to which an event can be added."""
        self.is_marked = self.is_event_stream and self.status == 200 and PROGRESS in first
        """Whether its events say how far the answer has come (`core.continuation`)."""
        self._answer, self._watchdog, self._wait = answer, watchdog, wait
        self._is_open = True
        wait.received = answer.progress

    def read_now(self, max_bytes: int) -> bytes | None:
        """Like `read`, if all of the body has arrived; None: wait for it."""
        with _Named(self.instance):
            return self._answer.read_now(max_bytes)

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PeerLost` also if it is longer than `max_bytes`."""
        with _Named(self.instance):
            return await self._watchdog.within(self._wait, self._answer.read(max_bytes))

    async def relay(self, response: Response, passage: http.Passage = http.UNCHANGED) -> None:
        """Forward the body to a response that has begun, and end it. `passage` may change bytes, but not their
        number."""
        if not self._answer.relay_now(response, passage):
            await self._forwarded(self._answer.relay(response, passage))

    async def relay_payload(self, response: Response, passage: http.Passage) -> None:
        """Write what `passage` makes of the body to a response that has begun, and leave the response open, since
        another instance may send the rest. `UnreadableStream` of `passage` does not count as a failure of the
        instance."""
        self._wait.movable = True
        await self._forwarded(self._answer.relay(response, passage, ends=False))

    async def _forwarded(self, body: Coroutine[Any, Any, None]) -> None:
        with _Named(self.instance):
            try:
                await self._watchdog.within(self._wait, body)
            except UnreadableStream:
                raise
            except TransferError:
                self.instance.failed(reachable=True)  # it may be another process when it is back
                raise

    def close(self) -> None:
        """Return the connection to the pool if the answer was read to its end; otherwise cut it, so that the instance
        stops."""
        if self._is_open:
            self._is_open = False
            self.instance.in_flight -= 1
            self._answer.close()


class SentLeg:
    """A client's leg on its way to an instance, which counts as in flight there, and whose wait the watchdog knows and
    ends by waking who waits for the connection."""

    __slots__ = ("connection", "instance", "is_open", "sent", "wait")

    def __init__(self, instance: Instance, sent: Sent, wait: Wait) -> None:
        self.instance, self.sent, self.wait = instance, sent, wait
        self.connection = sent.connection
        wait.wake = self.connection.wake
        self.is_open = True
        """Whether nobody has taken the answer yet, or given it up."""

    @property
    def is_lost(self) -> bool:
        """Whether no answer will come of it, for now."""
        return self.connection.lost is not None or self.wait.given_up

    @property
    def status(self) -> int:
        """The answer's, 0 before it is here."""
        return self.connection.status

    @property
    def has_begun(self) -> bool:
        """Whether the answer's first bytes are here."""
        return self.connection.has_begun

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer is here."""
        return self.connection.complete

    @property
    def will_be_whole(self) -> bool:
        """Whether an answer that has begun is a good one, and may be waited for until `is_whole`."""
        return self.connection.status == 200 and self.connection.fits

    def wake_at_next(self, waiter: asyncio.Future[None]) -> None:
        """Set `waiter` when something changes."""
        self.connection.wake_at_next(waiter)

    def wake(self) -> None:
        """As if something had changed."""
        self.connection.wake()

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever something changes, until somebody waits for the leg or it is over."""
        self.connection.on_change(watcher)


class Upstream:
    """An HTTP client for instances; an asynchronous context manager."""

    def __init__(
        self, config: RouterConfig, clock: Clock, access: InstanceAccess = OPEN, fleet_keys: Sequence[str] = ()
    ) -> None:
        self._first_byte_s, self._silence_s = config.first_byte_timeout_s, config.between_bytes_timeout_s
        self._total_s = config.answer_timeout_s
        self.authorization: RawHeaders = [] if access.instance_api_key is None else [bearer(access.instance_api_key)]
        """For the legs of clients, in place of the client's own; empty: the client's own goes on."""
        self._watchdog = Watchdog(clock, min(config.first_byte_timeout_s, config.between_bytes_timeout_s))
        self._http = HttpClient(ClientConfig(idle_s=_IDLE_CONNECTION_S, fast_path=True), access.tls_context())
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
        silence_s = self._first_byte_s
        if body is not None:
            silence_s += len(body) / _SLOWEST_PREFILL
        return Wait(instance, silence_s, max(self._total_s, silence_s), beside=beside)

    async def open(
        self, instance: Instance, method: str, target: str, headers: bytes, body: bytes | None, wait: Wait
    ) -> UpstreamAnswer:
        """Send a client's leg, with these lines of headers, and wait for the first bytes of the answer, within the
        limits of `wait`.

        Cancelling it cuts the connection. Raises `Unreachable`, `Silent` or `PeerLost`, and notes that on the instance.
        """
        answer = self._send(instance, method, target, headers, body)
        instance.in_flight += 1
        return await self._answered(instance, wait, answer, None)

    def send(
        self, instance: Instance, method: str, target: str, headers: bytes, body: bytes | None, wait: Wait
    ) -> SentLeg | None:
        """Like `open`, without waiting for the answer; None, and nothing was sent, if there is no free connection.
        Whoever sends calls `finish`, `finish_now`, `read_now` or `abandon`."""
        target = instance.base_path + target
        try:
            sent = self._http.send(instance.origin, method, target, headers, body, self._deadlines)
        except ValueError:
            return None  # `open` says what is wrong
        if sent is None:
            return None
        self._watchdog.begin(wait)
        instance.in_flight += 1
        return SentLeg(instance, sent, wait)

    async def finish(self, leg: SentLeg) -> UpstreamAnswer:
        """The answer to what was sent, as `open` returns it, and with the same errors."""
        leg.is_open, wait, since = False, leg.wait, leg.wait.since
        self._watchdog.end(wait)
        try:
            answer = self._sent_before(leg, given_up=wait.given_up)
            return await self._answered(leg.instance, wait, answer, since)
        except BaseException:
            leg.sent.abandon()
            raise

    def finish_now(self, leg: SentLeg) -> UpstreamAnswer:
        """The same for a leg that `has_begun`."""
        leg.is_open = False
        self._watchdog.end(leg.wait, answered=True)
        return self._upstream_answer(leg.instance, leg.sent.answer_now())

    def read_now(self, leg: SentLeg, max_bytes: int) -> bytes:
        """The body of the answer, for a leg that `is_whole`. Raises `PeerLost` if it is longer than `max_bytes`."""
        answer = self.finish_now(leg)
        try:
            content = answer.read_now(max_bytes)
        finally:
            answer.close()
        assert content is not None
        return content

    def abandon(self, leg: SentLeg) -> None:
        """Unless somebody has taken the answer: cut the connection, so that the instance stops."""
        if leg.is_open:
            leg.is_open = False
            self._watchdog.end(leg.wait)
            leg.sent.abandon()
            leg.instance.in_flight -= 1

    async def _sent_before(self, leg: SentLeg, *, given_up: bool) -> http.Answer:
        if given_up:
            raise Silent(f"{leg.instance} was given up without an answer")
        return await _begun(await self._http.finish(leg.sent, repeatable=True))

    async def _answered(
        self, instance: Instance, wait: Wait, answer: Coroutine[Any, Any, http.Answer], since: float | None
    ) -> UpstreamAnswer:
        """What is sent already counts as in flight."""
        try:
            with _Named(instance):
                return self._upstream_answer(instance, await self._watchdog.within(wait, answer, since))
        except PeerLost as error:
            instance.in_flight -= 1
            instance.failed(reachable=not isinstance(error, Unreachable))
            raise
        except BaseException:
            instance.in_flight -= 1
            raise

    def _upstream_answer(self, instance: Instance, answer: http.Answer) -> UpstreamAnswer:
        after = Wait(instance, self._silence_s, max(self._total_s, self._silence_s), movable=False)
        return UpstreamAnswer(instance, answer, self._watchdog, after)

    async def _send(
        self, instance: Instance, method: str, target: str, headers: bytes, body: bytes | None
    ) -> http.Answer:
        # A leg may be sent again on a new connection when an idle one turns out to be closed: nothing had come of it.
        return await _begun(
            await self._http.open(
                instance.origin,
                method,
                instance.base_path + target,
                headers,
                body,
                deadlines=self._deadlines,
                repeatable=True,
            )
        )

    def forget(self, instance: Instance) -> None:
        """The instance is gone for good: close the connections to it."""
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
        """A request of the router's own: status and body. Raises `TransferError`, of which `TransferTimeout` is one."""
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


async def _begun(answer: http.Answer) -> http.Answer:
    """Once the first bytes of its body are here."""
    try:
        await answer.ready()
    except BaseException:
        answer.close()
        raise
    return answer


class _Named:
    """Translates the errors of the `http` package into errors that name the instance."""

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
            raise PeerLost(f"the answer of {self._instance} is incomplete: {error}") from error
