"""Publishes an instance's KV events, and replays the last of them for followers that missed some.

Owns both sockets, the sequence numbers, and the history for replays. `publish` belongs to one thread; another serves
replays, each follower at its own pace, so that a slow one delays no other. Any client can connect: a few messages for
each follower wait in ZeroMQ, and the others here, as references to the history. ZeroMQ does not authenticate clients,
and events contain the tokens of prompts: bind to trusted networks only.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import Thread
from kvferry.kv_events.messages import END_OF_REPLAY, Event, encode_batch
from kvferry.kv_events.sockets import require_endpoint, zmq

logger = logging.getLogger(__name__)

_POLL_MS, _PAUSE_MS = 200, 2
"""Milliseconds between two polls for a replay request; the shorter while a follower has yet to take its replay."""

_MAX_UNSENT = 16
"""Max messages for one follower that wait in ZeroMQ."""


@dataclass(frozen=True)
class EventAddresses:
    """The addresses at which events are published and replayed."""

    endpoint: str
    replay_endpoint: str


class KVEventPublisher:
    """`endpoint` as in tcp://127.0.0.1:5557; port `*` is any free one. Replays have a free port of the same host unless
    `replay_endpoint` says otherwise."""

    max_history_bytes = 64 * 2**20
    max_topic_bytes = 64 * 2**10
    """Bytes of all different topics that followers may subscribe to. ZeroMQ stores them, at some 45 bytes for each
    byte; kvferry's own followers subscribe to the empty topic."""
    max_frame_bytes = 256
    """Longest frame that is received: a replay request has 8 bytes, a subscription the beginning of a topic."""
    close_timeout_s = 2.0

    def __init__(self, endpoint: str, replay_endpoint: str | None, clock: Clock, *, max_history: int = 10_000) -> None:
        """Raises `ConfigError` if an address cannot be bound, `MissingDependency` without ZeroMQ."""
        require_endpoint(endpoint, "--kv-events")
        replay_endpoint = replay_endpoint or f"{endpoint.rpartition(':')[0]}:*"
        require_endpoint(replay_endpoint, "--kv-events-replay")
        library = zmq()
        self._clock = clock
        self._history: deque[tuple[int, bytes]] = deque(maxlen=max_history)
        self._lock = threading.Lock()
        self._next = self._history_bytes = 0
        self._context = library.Context()
        try:
            self._pub, bound_endpoint = self._bind(library.XPUB, endpoint, "--kv-events")
            self._replay, bound_replay_endpoint = self._bind(library.ROUTER, replay_endpoint, "--kv-events-replay")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.addresses = EventAddresses(bound_endpoint, bound_replay_endpoint)
        self.topic_bytes = 0
        """Bytes of the topics to which followers subscribe now."""
        self._closing = threading.Event()
        self._thread = Thread(self._serve_replays, name="kv-event-replay")
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Publish these events, in this order. Does not block: a follower that reads too slowly misses some, and
        requests them again."""
        payload = encode_batch(self._clock.wall(), events)
        number = self._next
        self._next += 1
        with self._lock:
            while self._history and (
                self._history_bytes > self.max_history_bytes or len(self._history) == self._history.maxlen
            ):
                self._history_bytes -= len(self._history.popleft()[1])
            self._history.append((number, payload))
            self._history_bytes += len(payload)
        if self.topic_bytes > self.max_topic_bytes:
            self._disconnect_all()
        if not self._pub.closed:
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
            self._count_topics()

    def close(self) -> None:
        """End the thread and both sockets."""
        self._closing.set()
        self._thread.join(self.close_timeout_s)
        if not self._thread.is_alive():  # a live thread still uses the sockets
            self._context.destroy(linger=0)

    def _count_topics(self) -> None:
        """Count the topics to which followers subscribe and unsubscribe, until there are too many."""
        library = zmq()
        try:
            while self.topic_bytes <= self.max_topic_bytes:
                frame = self._pub.recv(library.NOBLOCK)
                self.topic_bytes += len(frame) if frame[:1] == b"\x01" else -len(frame)
        except library.Again:
            pass

    def _disconnect_all(self) -> None:
        """Disconnect all followers, which ends their subscriptions. They reconnect, and request the events that they
        missed. The address may take a moment to be free: until then, events are only stored for replays."""
        if not self._pub.closed:
            logger.warning("KV events: followers subscribed to too many topics, and were disconnected")
            self._pub.close(linger=0)
        try:
            self._pub, _ = self._bind(zmq().XPUB, self.addresses.endpoint, "--kv-events")
            self.topic_bytes = 0
        except ConfigError:
            pass

    def _bind(self, kind: int, endpoint: str, flag: str) -> tuple[Any, str]:
        library = zmq()
        socket = self._context.socket(kind)
        socket.setsockopt(library.MAXMSGSIZE, self.max_frame_bytes)
        socket.setsockopt(library.RCVHWM, _MAX_UNSENT)
        if kind == library.ROUTER:
            socket.setsockopt(library.SNDHWM, _MAX_UNSENT)
            socket.setsockopt(
                library.ROUTER_MANDATORY, 1
            )  # an error, not a lost message, if the follower is gone or full
        try:
            socket.bind(endpoint)
        except library.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"{flag} {endpoint}: {error}") from error
        return socket, socket.getsockopt_string(library.LAST_ENDPOINT)

    def _serve_replays(self) -> None:
        replays = Replays(self._replay, self._clock)
        while not self._closing.is_set():
            try:
                if self._replay.poll(_PAUSE_MS if replays else _POLL_MS):
                    self._begin_replay(replays, self._replay.recv_multipart())
                replays.send_pending()
            except Exception:
                # The edge of this thread: one malformed request must not end replays for everyone.
                logger.exception("a replay of KV events failed")

    def _begin_replay(self, replays: Replays, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        caller, _, first = frames
        with self._lock:
            messages = [message for message in self._history if message[0] >= int.from_bytes(first, "big")]
        replays.begin(caller, messages)


@dataclass
class _Replay:
    pending: deque[tuple[bytes, bytes]]
    deadline: float


class Replays:
    """Owns the active replays, not the socket: a ROUTER that refuses a message to a follower that is gone or full
    (`ROUTER_MANDATORY`). Belongs to one thread."""

    stall_s = 10.0
    """Seconds that a follower may leave its messages unread before its replay is dropped."""
    max_replays = 64
    """Max replays at one time; further requests are not answered, and may be repeated."""

    def __init__(self, socket: Any, clock: Clock) -> None:
        self._socket, self._clock = socket, clock
        self._active: dict[bytes, _Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._active)

    def begin(self, follower: bytes, messages: Iterable[tuple[int, bytes]]) -> None:
        """Begin to send a follower these messages and the end mark. Ignored while the follower's previous replay is
        active."""
        if follower in self._active or len(self._active) >= self.max_replays:
            return
        pending = deque((number.to_bytes(8, "big"), payload) for number, payload in messages)
        pending.append((END_OF_REPLAY, b""))
        self._active[follower] = _Replay(pending, self._clock.monotonic() + self.stall_s)

    def send_pending(self) -> None:
        """Send what followers can take now. Does not block."""
        now = self._clock.monotonic()
        for follower, replay in list(self._active.items()):
            if self._send(follower, replay.pending):
                replay.deadline = now + self.stall_s
            if not replay.pending or now >= replay.deadline:
                del self._active[follower]

    def _send(self, follower: bytes, pending: deque[tuple[bytes, bytes]]) -> bool:
        """True if the follower took some messages. Messages for a follower that is gone are dropped."""
        num_before, library = len(pending), zmq()
        try:
            while pending:
                number, payload = pending[0]
                self._socket.send_multipart((follower, b"", b"", number, payload), library.NOBLOCK, copy=False)
                pending.popleft()
        except library.Again:
            pass
        except library.ZMQError:
            pending.clear()
        return len(pending) < num_before
