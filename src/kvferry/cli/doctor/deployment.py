"""Findings about a running deployment: its instances, their clocks and checks, and the rate of its hand-offs in
comparison with the rate between two processes of this machine."""

from __future__ import annotations

import mmap
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.cli.client.stream import COMPLETIONS_PATH, OpenAIClient
from kvferry.cli.doctor.finding import Finding, good, problem, unknown
from kvferry.cli.text import milliseconds, printable
from kvferry.cli.watch.servers import InstanceView, Servers
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError
from kvferry.core.messages.timeline import Timeline
from kvferry.core.runtime.threads import Thread

MAX_SKEW_S = 0.5
NUM_REQUESTS = 3
_SLOW_SHARE = 0.05
"""Share of the medium's rate below which a hand-off of at least `_MIN_BYTES` is a finding."""
_MIN_BYTES = 4 * 2**20
_TAKEN_METRICS = re.compile(
    rb"^kvferry:connector_(taken_bytes|taken_seconds|taken)_total\{([^}\n]*)\} ([0-9.e+-]+)$", re.M
)
_KIND = re.compile(rb'kind="([^"]*)"')
_LOCAL = ("127.0.0.1", "localhost", "::1")

_MEASURED_BYTES = 64 * 2**20
_CHUNK = 2**20
"""Bytes that are copied or sent to measure a medium, and in one call."""


@dataclass(frozen=True)
class HandOffs:
    """Totals of the KV that instances have fetched since their start: bytes by medium, seconds, and number of
    hand-offs."""

    bytes_by_medium: Mapping[str, float]
    seconds: float = 0.0
    count: float = 0.0

    def since(self, before: HandOffs) -> HandOffs:
        """The increase since `before`."""
        names = self.bytes_by_medium
        grown = {name: names[name] - before.bytes_by_medium.get(name, 0.0) for name in names}
        return HandOffs(
            {name: value for name, value in grown.items() if value > 0},
            self.seconds - before.seconds,
            self.count - before.count,
        )


def read_hand_offs(metrics: bytes) -> HandOffs:
    """The hand-offs in an instance's metrics."""
    by_medium: dict[str, float] = {}
    totals = {"taken_seconds": 0.0, "taken": 0.0}
    for name, labels, text in _TAKEN_METRICS.findall(metrics):
        if name == b"taken_bytes":
            kind = _KIND.search(labels)
            medium = kind[1].decode(errors="replace") if kind else ""
            by_medium[medium] = by_medium.get(medium, 0.0) + float(text)
        else:
            totals[name.decode()] += float(text)
    return HandOffs(by_medium, totals["taken_seconds"], totals["taken"])


async def examine_deployment(
    url: str, servers: Servers, client: OpenAIClient, *, sends: bool
) -> AsyncIterator[Finding]:
    """All findings about the server at `url`. `sends`: also measure hand-offs, by sending long prompts."""
    try:
        instances = await servers.instances(url)
    except (KvferryError, ValueError) as error:
        yield problem(f"{url} does not answer: {error}", "kvferry status")
        return
    num_prefill = sum(view.role == "prefill" for view in instances)
    up = [view for view in instances if view.alive]
    text = f"{url}: {num_prefill} P, {len(instances) - num_prefill} D, {len(up)} up"
    yield good(text) if len(up) == len(instances) else problem(text, f"kvferry status {url}")
    for view in instances:
        if view.no_hand_off:
            reason = printable(view.no_hand_off)
            yield problem(f"{printable(view.name)} hands off nothing: {reason}", f"kvferry status {url}")
    for result in await servers.check_all(up):
        if result.problem:
            yield problem(f"{printable(result.instance.name)}: {printable(result.problem)}", f"kvferry status {url}")
    clocks = await _clock(url, servers)
    if clocks is not None:
        yield clocks
    missing = [role for role in ("prefill", "decode") if not any(view.role == role for view in up)]
    if missing:
        yield unknown(f"nothing is handed off: no {missing[0]} instance is up")
        return
    decoding = [view for view in up if view.role == "decode" and view.url]
    if not decoding:
        yield unknown(_NO_ADDRESSES)
        return
    async for finding in _hand_offs(url, servers, client, decoding, sends=sends):
        yield finding


_NO_ADDRESSES = "hand-offs are not measured: addresses of instances are shown to operators only (--admin-key)"


async def _clock(url: str, servers: Servers) -> Finding | None:
    """The difference between the router's clock and this machine's."""
    begun, wall = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
    try:
        now = float((await servers.json(url, "/kvferry/traffic?seconds=1"))["now"])
    except (KvferryError, KeyError, TypeError, ValueError):
        return None
    trip_s = SYSTEM_CLOCK.monotonic() - begun
    skew_s = abs(now - (wall + trip_s / 2))
    if skew_s > MAX_SKEW_S + trip_s:
        return problem(f"its clock differs from this machine's by {skew_s:.1f} s", "chronyc tracking")
    return good(f"its clock and this machine's are at most {milliseconds(skew_s + trip_s / 2)} apart")


async def _hand_offs(
    url: str, servers: Servers, client: OpenAIClient, decoding: list[InstanceView], *, sends: bool
) -> AsyncIterator[Finding]:
    before = await _fetched(servers, decoding)
    if sends:
        try:
            timelines = await _send(client)
        except KvferryError as error:
            yield problem(f"a request fails: {error}", f"kvferry status {url}")
            return
        if skewed := [name for timeline in timelines for name in _backward(timeline)]:
            yield problem(f"times of P and D run backwards ({skewed[0]}): their clocks differ", "chronyc tracking")
    after = await _fetched(servers, decoding)
    measured = after.since(before) if sends else after
    if not measured.count:
        period = "of the requests just sent" if sends else "so far"
        yield problem(f"nothing {period} was handed off", f"kvferry why {url}")
        return
    num_bytes = sum(measured.bytes_by_medium.values())
    media = ", ".join(sorted(filter(None, measured.bytes_by_medium))) or "an unnamed medium"
    rate = num_bytes / measured.seconds if measured.seconds > 0 else 0.0
    size = num_bytes / measured.count / 1e6
    took = milliseconds(measured.seconds / measured.count)
    text = f"P → D: {_rate(rate)} over {media} ({measured.count:.0f} hand-offs of {size:.1f} MB, {took} each)"
    is_local = all((urlsplit(view.url).hostname or "") in _LOCAL for view in decoding)
    if not is_local:
        yield good(f"{text}; the network's own rate cannot be measured from here (iperf3)")
        return
    yield _beside_medium(text, rate, num_bytes / measured.count, measured.bytes_by_medium)


def _beside_medium(text: str, rate: float, mean_bytes: float, media: Mapping[str, float]) -> Finding:
    """A finding about the measured rate in comparison with the rate of the medium, for instances on this machine."""
    shared = shared_memory_rate()
    if not any(name in ("shm", "cuda_ipc") for name in media):
        name = next(iter(media), "tcp")
        loopback = loopback_rate()
        return problem(
            f"{text}; {name} here carries {_rate(loopback)}, shared memory {_rate(shared)}: P and D are on one machine,"
            " and do not use its memory",
            'leave out "transport" in --kv-transfer-config, and start P and D as the same user',
        )
    text = f"{text}; one core copies {_rate(shared)} from shared memory"
    if mean_bytes >= _MIN_BYTES and rate < _SLOW_SHARE * shared:
        return problem(f"{text}: cores are busy", "give P and D cores of their own: --cores")
    return good(text)


async def _fetched(servers: Servers, instances: list[InstanceView]) -> HandOffs:
    by_medium: dict[str, float] = {}
    seconds = count = 0.0
    for view in instances:
        try:
            status, text = await servers.get(view.url, "/metrics")
        except KvferryError:
            continue
        part = read_hand_offs(text if status == 200 else b"")
        for medium, num_bytes in part.bytes_by_medium.items():
            by_medium[medium] = by_medium.get(medium, 0.0) + num_bytes
        seconds, count = seconds + part.seconds, count + part.count
    return HandOffs(by_medium, seconds, count)


async def _send(client: OpenAIClient) -> list[Timeline]:
    """Send different prompts that are long enough to be handed off."""
    models = await client.models()
    limit = min((model.max_tokens or 4096 for model in models), default=4096)
    timelines = []
    for number in range(NUM_REQUESTS):
        words = f"Request {SYSTEM_CLOCK.wall():.6f} {number}: " + "one two three four " * (min(limit, 2048) // 16)
        fields: dict[str, Any] = {"return_timeline": True} if models[0].owner == "kvferry" else {}
        body = {"model": models[0].name, "prompt": words, "max_tokens": 2, "temperature": 0, **fields}
        reply = await client.stream(COMPLETIONS_PATH, body)
        if reply.timeline is not None:
            timelines.append(reply.timeline)
    return timelines


def _backward(timeline: Timeline) -> list[str]:
    """Findings about the order of phases of two processes, if the clocks of one machine cannot explain it."""
    pairs = (("routed", "prefill_queued"), ("prefill_done", "transfer_done"), ("transfer_done", "done"))
    return [
        f"{start} after {end}" for start, end in pairs if (span := timeline.span(start, end)) and span < -MAX_SKEW_S
    ]


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if value >= 1e9 else f"{value / 1e6:.0f} MB/s"


def shared_memory_rate(num_bytes: int = _MEASURED_BYTES, clock: Clock = SYSTEM_CLOCK) -> float:
    """Bytes a second that one core copies out of shared memory, as D does. Raises `OSError`."""
    descriptor = os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as shared:
            shared[:] = bytes(num_bytes)
            target, best_s = bytearray(num_bytes), float("inf")
            for _ in range(3):
                begun = clock.monotonic()
                with memoryview(shared) as view:
                    target[:] = view
                best_s = min(best_s, clock.monotonic() - begun)
    finally:
        os.close(descriptor)
    return num_bytes / max(best_s, 1e-9)


def loopback_rate(num_bytes: int = _MEASURED_BYTES, clock: Clock = SYSTEM_CLOCK) -> float:
    """Bytes a second of one TCP connection within this machine. Raises `OSError`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Thread(_send_bytes, server.getsockname(), num_bytes, name="sends")
        server.settimeout(10.0)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            buffer, received, begun = bytearray(_CHUNK), 0, clock.monotonic()
            while received < num_bytes:
                count = connection.recv_into(buffer)
                if not count:
                    raise ConnectionResetError("the connection ended early")
                received += count
            seconds = clock.monotonic() - begun
        sender.join(10.0)
    return num_bytes / max(seconds, 1e-9)


def _send_bytes(address: tuple[str, int], num_bytes: int) -> None:
    chunk = bytes(_CHUNK)
    with suppress(OSError), socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(num_bytes // _CHUNK):
            connection.sendall(chunk)
