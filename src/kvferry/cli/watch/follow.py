"""Finds a router of this user, and reads the stream of its page. For a server that has no page (an instance of
kvferry's, vLLM's or SGLang's), the events are made from its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from kvferry.cli.router_address import RouterAddress, reachable_url
from kvferry.cli.running import running_commands
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError, KvferryError, ProtocolError, TransferError
from kvferry.core.keys import http_secret
from kvferry.dashboard.figures import MAX_METRICS_BYTES, Figures, gauges, increase, quantile, read_figures
from kvferry.dashboard.routes import FEED_PATH
from kvferry.dashboard.series import make_point
from kvferry.fleet.places import fleet_names, ledger_of
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.tls import client_context

PORTS = range(8000, 8016)
"""Ports of this machine on which a router is searched."""
_MAX_EVENT = 16 * 2**20
_CONNECT_S, _PROBE_S = 10.0, 1.0

TICK_S = 2.0
"""Seconds between two readings of a server's metrics."""


async def events(address: RouterAddress) -> AsyncGenerator[bytes]:
    """Yield the contents of the events of a router's page, or events that are made from an instance's metrics. Raises
    `ConfigError` if neither is served or a key is needed, and `TransferError` when the server is lost."""
    origin = Origin.parse(address.router, "URL")
    tls = client_context(address.tls_ca) if origin.tls else None
    key = address.admin_key
    async with HttpClient(tls=tls, client_name="this command") as http:
        client = SignedClient(http, http_secret([key] if key else []), key)
        headers = await client.authorization(origin, "GET", FEED_PATH, purpose="operate", timeout_s=_CONNECT_S)
        call = http.start(origin, "GET", FEED_PATH, headers, connect_s=_CONNECT_S)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await call.begun()
            if call.status == 404:
                call.close()
                async with aclosing(scraped_events(str(origin), lambda: _metrics(client, origin))) as scraped:
                    async for content in scraped:
                        yield content
            _require_feed(origin, call.status)
            rest = b""
            async for chunk in call.chunks():
                *complete, rest = (rest + chunk).split(b"\n\n")
                if len(rest) > _MAX_EVENT:
                    raise ProtocolError(f"{origin} sent an update of more than {_MAX_EVENT} bytes")
                for event in complete:
                    if event.startswith(b"data: "):
                        yield event[6:]
        except TimeoutError as error:
            raise TransferError(f"{origin} did not answer within {_CONNECT_S:g} s") from error
        finally:
            call.close()


def _require_feed(origin: Origin, status: int) -> None:
    match status:
        case 200:
            return
        case 401 | 403:
            raise ConfigError(f"{origin} needs its admin key: add --admin-key KEY, or set KVFERRY_ADMIN_KEY")
        case _:
            raise ConfigError(f"{origin} answers {status} to GET {FEED_PATH}")


async def _metrics(client: SignedClient, origin: Origin) -> bytes:
    """The server's text of metrics. Raises `ConfigError` if it serves none, and `TransferError`."""
    status, _, text = await client.ask(
        origin, "GET", "/metrics", purpose="operate", timeout_s=_CONNECT_S, max_bytes=MAX_METRICS_BYTES
    )
    if status in (401, 403):
        _require_feed(origin, status)
    if status != 200:
        raise ConfigError(f"{origin} serves neither a page nor /metrics: --no-page, or it has an admin port for them")
    return text


async def scraped_events(
    url: str, metrics: Callable[[], Awaitable[bytes]], clock: Clock = SYSTEM_CLOCK, tick_s: float = TICK_S
) -> AsyncGenerator[bytes]:
    """Yield a snapshot, and a delta every `tick_s`. `metrics`: returns the server's text of metrics. Raises
    `ConfigError` if it has no metric of a known engine."""
    text = await metrics()
    figures, at = read_figures(text), clock.monotonic()
    if not figures.values:
        raise ConfigError(f"{url} has neither a page nor metrics of kvferry's, vLLM's or SGLang's")
    engine, name = engine_of(text), url.partition("://")[2]
    head = {"type": "snapshot", "kind": "instance", "models": [], "points": []}
    yield _encode({**head, "now": clock.wall(), "instances": {name: _view(name, engine, figures)}})
    while True:
        await asyncio.sleep(tick_s)
        before, figures = figures, read_figures(await metrics())
        seconds, at = clock.monotonic() - at, clock.monotonic()
        grown = increase(before, figures)
        point = msgspec.to_builtins(make_point(clock.wall(), seconds, (), grown, seconds))
        for label, share in (("ttft_p50", 0.5), ("ttft_p99", 0.99)):
            ttft_s = quantile(grown.ttft, share)
            point[label] = None if ttft_s is None else 1000 * ttft_s
        point["requests"] = sum(grown.ttft.values()) and max(grown.ttft.values()) / seconds
        yield _encode(
            {
                "type": "delta",
                "now": clock.wall(),
                "instances": {name: _view(name, engine, figures)},
                "point": point,
            }
        )


def engine_of(metrics: bytes) -> str:
    """The engine whose metrics these are."""
    if b"kvferry:" in metrics:
        return "kvferry"
    return "sglang" if b"sglang:" in metrics else "vllm"


def _view(name: str, engine: str, figures: Figures) -> dict[str, Any]:
    return {"name": name, "role": "both", "state": "up", "alive": True, "engine": engine, **gauges(figures)}


def _encode(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event)


def candidates() -> list[str]:
    """The URLs of this user's fleets and commands, the newest first, then of this machine's usual ports."""
    urls = []
    for name in fleet_names():
        status = ledger_of(name).status()
        if status is not None:
            urls.append(status.url)
    urls += [reachable_url(record.url) for record in reversed(running_commands())]
    return [*dict.fromkeys([*filter(None, urls), *(f"http://127.0.0.1:{port}" for port in PORTS)])]


async def find(urls: Iterable[str]) -> str:
    """The first of these URLs at which a page or an engine's metrics are served. Raises `ConfigError` if
    there is none."""

    async def serves(http: HttpClient, url: str) -> bool:
        try:
            origin = Origin.parse(url)
            status, _, _ = await http.ask(origin, "GET", "/", timeout_s=_PROBE_S)
            if status == 200:
                return True
            status, _, text = await http.ask(origin, "GET", "/metrics", timeout_s=_PROBE_S)
        except (KvferryError, ValueError):
            return False
        return status == 200 and bool(read_figures(text).values)

    tried = list(urls)
    async with HttpClient(client_name="this command") as http:
        answers = await asyncio.gather(*(serves(http, url) for url in tried))
    for url, answer in zip(tried, answers, strict=True):
        if answer:
            return url
    raise ConfigError(
        "no router was found: none of this user's fleets runs, and none serves a page at ports"
        f" {PORTS.start} to {PORTS.stop - 1}; give its URL, such as http://127.0.0.1:8000"
    )
