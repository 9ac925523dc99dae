"""Instances and routers for tests: real HTTP servers on free ports, in the test's own event loop.

A `Peer` follows the instances' protocol and answers as its test tells it to. It records what it was sent and says,
through events, when something has happened; nothing here waits for time to pass.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.core.keys import CHALLENGE_PATH, Purpose, Signer
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.listen import listen
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig


@asynccontextmanager
async def serving(app: Any, tls: tuple[Path, Path] | None = None, client_ca: Path | None = None) -> AsyncIterator[str]:
    """The base URL at which `app` is served, under TLS with a certificate and its key. With `client_ca` clients must
    have one of that authority."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    if tls is not None:
        config.ssl_certfile, config.ssl_keyfile = tls
    if client_ca is not None:
        config.ssl_ca_certs, config.ssl_cert_reqs = str(client_ca), ssl.CERT_REQUIRED
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await server.shutdown([listener])


@dataclass
class Call:
    """One request that a peer was sent."""

    path: str
    headers: dict[str, str]
    body: Any


Answering = Callable[["Peer", Request, Any], Awaitable[Response]]


@dataclass
class Peer:
    """One instance. `answering` makes the answer to a completion; `facts` None: GET /kvferry/instance is not there;
    `vllm`: the version it gives as a vLLM server; `hangs`: GET /health gets no answer; `release_hangs`: nor does
    POST /kvferry/release; `moved_to`: where other paths are redirected; `names_itself`: its health says which engine it
    is; `more_paths`: those that `answering` serves beside completions."""

    role: str
    answering: Answering
    facts: dict[str, Any] | None = None
    vllm: str = ""
    metrics: Callable[[Peer], Awaitable[str | Response]] | None = None
    healthy: bool = True
    hangs: bool = False
    release_hangs: bool = False
    moved_to: str = ""
    names_itself: bool = False
    more_paths: tuple[str, ...] = ()
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    others: list[Call] = field(default_factory=list)
    num_asked: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    looked_at: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    released: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def app(self) -> Starlette:
        """Its routes."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                *(Route(path, self._complete, methods=["POST"]) for path in self.more_paths),
                Route("/kvferry/instance", self._about),
                Route("/kvferry/release", self._release, methods=["POST"]),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/server_info", self._server_info),
                Route("/get_server_info", self._server_info),
                *([Route("/v1/models", self._vllm_models)] if self.vllm else []),
                Route("/{path:path}", self._other, methods=["GET", "POST", "DELETE"]),
            ]
        )

    async def close(self) -> None:
        """Stop serving: connections are refused from now on."""
        self.leaves.set()
        await self.gone.wait()

    async def _complete(self, request: Request) -> Response:
        raw = await request.body()
        try:
            body = json.loads(raw)
        except json.JSONDecodeError:
            body = raw
        self.calls.append(Call(request.url.path, dict(request.headers), body))
        self.called.set()
        return await self.answering(self, request, body)

    async def _about(self, request: Request) -> Response:
        self.num_asked += 1
        return JSONResponse(self.facts) if self.facts else JSONResponse({"detail": "Not Found"}, status_code=404)

    async def _release(self, request: Request) -> Response:
        self.released.put_nowait((await request.json())["transfer_id"])
        if self.release_hangs:
            await _until_gone(request.receive)
        return JSONResponse({"released": True})

    async def _health(self, request: Request) -> Response:
        self.looked_at.put_nowait(None)
        if self.hangs:
            await _until_gone(request.receive)
        named = {"status": "ok", "engine_id": (self.facts or {}).get("engine_id", "")}
        content = json.dumps(named) if self.names_itself else ""
        return Response(content, status_code=200 if self.healthy else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.vllm}) if self.vllm else JSONResponse({}, status_code=404)

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse({}, status_code=404)

    async def _metrics(self, request: Request) -> Response:
        answer = await self.metrics(self) if self.metrics else ""
        return Response(answer, media_type="text/plain") if isinstance(answer, str) else answer

    async def _vllm_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})

    async def _other(self, request: Request) -> Response:
        body = (await request.body()).decode()
        target = request.scope["raw_path"].decode() + "?" + request.url.query
        self.others.append(Call(target, dict(request.headers), body))
        if self.moved_to:
            return Response(status_code=307, headers={"Location": self.moved_to})
        return JSONResponse({"role": self.role, "path": request.url.path, "data": []}, headers={"X-Other": "kept"})


# Ways to answer.


async def ticket(peer: Peer, request: Request, body: Any) -> Response:
    """P: done, here is the ticket."""
    return JSONResponse({"choices": [{"text": "x"}], "kv_transfer_params": ticket_for(peer, body)})


def ticket_for(peer: Peer, body: Any) -> dict[str, Any]:
    """The ticket that P gives for a body."""
    asked = body["kv_transfer_params"]
    engine_id = (peer.facts or {}).get("engine_id", "other-engine")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": asked["transfer_id"],
        "remote_engine_id": engine_id,
        "remote_block_ids": [[1, 2, 3]],
        "prefill_result": {"first_token": 7, "seed": body["seed"]},
    }


async def ticket_when_told(peer: Peer, request: Request, body: Any) -> Response:
    """P: computes until `go` is set, and notices when its caller leaves."""
    if not await go_or_disconnect(peer, request):
        raise ClientDisconnect
    return await ticket(peer, request, body)


async def answer(peer: Peer, request: Request, body: Any) -> Response:
    """D: a whole answer, as one JSON object or as a stream of two events, as asked."""
    if not body.get("stream"):
        return JSONResponse({"choices": [{"text": "done"}], "usage": {"total_tokens": 3}})
    return StreamingResponse(iter([event("one"), event("two"), b"data: [DONE]\n\n"]), media_type="text/event-stream")


async def chat(peer: Peer, request: Request, body: Any) -> Response:
    """D: the chat answer "done", whole or as a stream of one event for each letter."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    head = {"id": "chatcmpl-1", "created": 1, "model": "m", "usage": usage}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "done"}
        return JSONResponse({**head, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    return StreamingResponse(iter([*map(chat_event, "done"), CHAT_END]), media_type="text/event-stream")


def chat_event(text: str = "", **choice: Any) -> bytes:
    """A chunk of a chat's stream."""
    delta = {"content": text} if text else {}
    head = {"id": "chatcmpl-1", "created": 1, "model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


CHAT_END = chat_event(finish_reason="stop") + b"data: [DONE]\n\n"
"""The end of a chat's stream."""


async def answer_once_there_is_a_ticket(peer: Peer, request: Request, body: Any) -> Response:
    """D: in a concurrent hand-off nothing until `go` is set, as it waits for P; otherwise a whole answer."""
    params = body.get("kv_transfer_params")
    if params and "prefill_result" not in params:
        return await answer_late(peer, request, body)
    return await answer(peer, request, body)


async def answer_when_told(peer: Peer, request: Request, body: Any) -> Response:
    """D: one event, the rest when `go` is set; notices when its caller leaves."""
    return Streaming(peer, request, [event("one")], [event("two"), b"data: [DONE]\n\n"])


async def answer_late(peer: Peer, request: Request, body: Any) -> Response:
    """D: nothing at all until `go` is set; notices when its caller leaves."""
    if not await go_or_disconnect(peer, request):
        raise ClientDisconnect
    return await answer(peer, request, body)


def failing(status: int, message: str = "no", **headers: str) -> Answering:
    """An error answer in OpenAI's form."""

    async def fail(peer: Peer, request: Request, body: Any) -> Response:
        return JSONResponse({"error": {"message": message, "from": peer.role}}, status_code=status, headers=headers)

    return fail


async def cut(peer: Peer, request: Request, body: Any) -> Response:
    """The connection breaks before a byte of the answer's body is there."""
    return Cut([])


async def cut_in_stream(peer: Peer, request: Request, body: Any) -> Response:
    """The connection breaks after the first event of a stream."""
    return Cut([event("one")])


def event(text: str) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


async def go_or_disconnect(peer: Peer, request: Request) -> bool:
    """Wait for `peer.go` (True) or for the caller to leave (False, and `peer.disconnected` is set)."""
    go = asyncio.create_task(peer.go.wait())
    gone = asyncio.create_task(_until_gone(request.receive))
    await asyncio.wait({go, gone}, return_when=asyncio.FIRST_COMPLETED)
    for task in (go, gone):
        task.cancel()
    if gone.done() and not gone.cancelled():
        peer.disconnected.set()
        return False
    return True


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Streaming(Response):
    """Some events now, the others when the peer is told to go on."""

    def __init__(self, peer: Peer, request: Request, now: list[bytes], later: list[bytes]) -> None:
        super().__init__()
        self._peer, self._request, self._now, self._later = peer, request, now, later

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        for chunk in self._now:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not await go_or_disconnect(self._peer, self._request):
            return
        for chunk in self._later:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Cut(Response):
    """An event stream that breaks off: the server closes the connection when the application just returns."""

    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, and leave."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


EVENT_STREAM = [(b"content-type", b"text/event-stream")]

CONCURRENT = {
    "role": "prefill",
    "engine_id": "engine-p",
    "kv_host": "127.0.0.1",
    "kv_port": 4711,
    "kv_ranks": None,
    "kv_seal": "sealed",
    "connector": "P2pConnector",
    "layout": "f00d",
    "model_names": ["m"],
}


DECODE = {**CONCURRENT, "role": "decode", "engine_id": "engine-d", "kv_port": 0}


@asynccontextmanager
async def instances(
    *peers: Peer, tls: tuple[Path, Path] | None = None, client_ca: Path | None = None
) -> AsyncIterator[None]:
    """Serve all of them, as `serving` does, and set their URLs."""
    async with asyncio.TaskGroup() as group:
        ready = [asyncio.Event() for _ in peers]
        engine_ids: set[str] = set()
        for number, peer in enumerate(peers):
            peer.leaves, peer.gone = asyncio.Event(), asyncio.Event()
            if peer.facts and peer.facts.get("engine_id") in engine_ids:  # two processes have two
                peer.facts = {**peer.facts, "engine_id": f"{peer.facts['engine_id']}-{number}"}
            engine_ids.add((peer.facts or {}).get("engine_id", ""))
        for peer, event_of_peer in zip(peers, ready, strict=True):
            group.create_task(_serve_peer(peer, event_of_peer, tls, client_ca))
        for event_of_peer in ready:
            await event_of_peer.wait()
        try:
            yield
        finally:
            for peer in peers:
                peer.leaves.set()


async def _serve_peer(peer: Peer, ready: asyncio.Event, tls: tuple[Path, Path] | None, client_ca: Path | None) -> None:
    async with serving(peer.app(), tls, client_ca) as peer.url:
        ready.set()
        await peer.leaves.wait()
    peer.gone.set()


@asynccontextmanager
async def routing(
    prefill: list[str],
    decode: list[str],
    http: HttpConfig | None = None,
    *,
    access: InstanceAccess | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Router, str]]:
    """A router before the instances at these URLs, and its own URL. Unless told otherwise, it looks at their health
    once, at the start, and does not wait for those that are full. In the end nothing is left of any request."""
    settings.setdefault("health_interval_s", 3600)
    settings.setdefault("policy", "round_robin")
    settings.setdefault("busy_wait_s", 0)
    config = RouterConfig(prefill_url=tuple(prefill), decode_url=tuple(decode), **settings)
    http = structs.replace(http or HttpConfig(shutdown_grace_s=1), port=0, max_body_bytes=config.max_body_bytes)
    router = build_router(config, http, access)
    server, ready = HttpServer(router.routes(), http, Lifecycle("router"), router.guard), asyncio.Event()
    async with router.running(), asyncio.TaskGroup() as group:
        running = group.create_task(server.run(lambda host, port: ready.set()))
        await ready.wait()
        await router.health.probe_all()
        try:
            yield router, f"{http.scheme}://127.0.0.1:{server.ports[0]}"
        finally:
            server.stop()
            await running
        server.check()
        assert router.services.legs.num_open == 0
    router.admission.check()
    router.turns.check()
    for instance in router.services.pools:
        load = instance.load
        assert instance.load.num_legs == load.num_prefills == load.num_decodes == 0
        assert abs(load.prefill_tokens) < 1e-6
    router.services.chooser.index.check()


SECRET = "the token of tests"


async def met(url: str, secret: str = SECRET) -> Signer:
    """What is known of a server that holds the secret. Raises `AuthenticationFailed` for another."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}{CHALLENGE_PATH}?nonce=n") as answer:
        return Signer(secret, "n", await answer.read())


async def signed(url: str, purpose: Purpose, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """The header of a request that kvferry's own process would send."""
    return {"Authorization": (await met(url)).sign(purpose, method, path, body)}


@asynccontextmanager
async def unused_address() -> AsyncIterator[str]:
    """A URL at which connections are refused, for as long as the context lasts."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{placeholder.getsockname()[1]}"
