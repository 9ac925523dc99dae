"""vLLM servers for tests, as far as their connectors' protocols go; each checks what vLLM 0.32 would.

`NixlPair`: P answers with a ticket, D fetches with it once, and a request that D refuses gives the ticket up.
`KvferryPair`: kvferry's P2P connector in both; D asks one of P's engines, which must have the hand-off or get it.
`MooncakePrefill` and `mooncake_decode`: P's bootstrap server, a P that keeps KV only of a request that its length limit
ended, a D that looks P's engine up before it waits for P.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.peers import Peer, answer, go_or_disconnect, serving

VERSION = "0.32.0"
NIXL_TICKET = {
    "remote_engine_id": "engine-p",
    "remote_host": "localhost",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 5,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 2,
}


@dataclass
class NixlPair:
    """One P and one D. `held`: the requests whose blocks P keeps."""

    held: set[str] = field(default_factory=set)
    given_up: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    waits: bool = False

    def __post_init__(self) -> None:
        self.prefill = Peer("prefill", self._prefill, vllm=VERSION)
        self.decode = Peer("decode", self._decode, vllm=VERSION)

    async def _prefill(self, peer: Peer, request: Request, body: Any) -> Response:
        asked = body["kv_transfer_params"]
        assert asked["do_remote_decode"] is True
        assert asked["do_remote_prefill"] is False
        assert {asked[name] for name in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")} == {
            None
        }
        assert (body["max_tokens"], body["stream"]) == (1, False)
        assert body.get("max_completion_tokens", 1) == 1
        assert body.get("min_tokens", 0) <= 1
        assert "stream_options" not in body
        if self.waits and not await go_or_disconnect(peer, request):
            raise ClientDisconnect
        name = f"cmpl-{request.headers['x-request-id']}-{uuid.uuid4().hex[:8]}"
        self.held.add(name)
        ticket = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": name, **NIXL_TICKET}
        return JSONResponse({"choices": [{"text": "dropped"}], "kv_transfer_params": ticket})

    async def _decode(self, peer: Peer, request: Request, body: Any) -> Response:
        ticket = body.get("kv_transfer_params") or {}
        if body["model"] != "m":
            self._give_up(ticket)
            return JSONResponse({"error": {"message": "no such model", "type": "NotFoundError"}}, status_code=404)
        if ticket.get("do_remote_prefill"):
            assert NIXL_TICKET.items() <= ticket.items()
            assert ticket["remote_request_id"] in self.held, "P's blocks are another's by now"
            self.held.discard(ticket["remote_request_id"])
        return await answer(peer, request, body)

    def _give_up(self, ticket: dict[str, Any]) -> None:
        assert NIXL_TICKET.items() <= ticket.items()
        self.held.remove(ticket["remote_request_id"])
        self.given_up.put_nowait(ticket["remote_request_id"])


@dataclass
class KvferryPair:
    """One P with engines that answer in turn, and one D. `kept`: by (engine, transfer id), what P has for D."""

    engine_ids: list[str]
    kept: dict[tuple[str, str], asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill = Peer("prefill", self._prefill, vllm=VERSION)
        self.decode = Peer("decode", self._decode, vllm=VERSION)
        self._turn = 0
        self.early: list[str] = []

    async def _prefill(self, peer: Peer, request: Request, body: Any) -> Response:
        engine_id = self.engine_ids[self._turn % len(self.engine_ids)]
        self._turn += 1
        if not await go_or_disconnect(peer, request):
            raise ClientDisconnect
        transfer_id = body["kv_transfer_params"]["transfer_id"]
        self._kept(engine_id, transfer_id).set()
        origin = {"remote_engine_id": engine_id, "remote_host": "127.0.0.1", "remote_port": 4711}
        own = {"transfer_id": transfer_id, "remote_prefixes": [[5, "digest"]], "remote_num_tokens": 5}
        params = {"do_remote_prefill": True, "do_remote_decode": False, **origin, **own}
        return JSONResponse({"choices": [{"text": "dropped"}], "kv_transfer_params": params})

    async def _decode(self, peer: Peer, request: Request, body: Any) -> Response:
        params = body["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 4711)
        if "remote_num_tokens" not in params:
            self.early.append(params["remote_engine_id"])
        await self._kept(params["remote_engine_id"], params["transfer_id"]).wait()
        return await answer(peer, request, body)

    def _kept(self, engine_id: str, transfer_id: str) -> asyncio.Event:
        return self.kept.setdefault((engine_id, transfer_id), asyncio.Event())


@dataclass
class MooncakePrefill:
    """A P with data-parallel engines, and its bootstrap server."""

    engine_ids: list[str]
    at_once: bool = True
    sends: dict[str, tuple[str, asyncio.Event]] = field(default_factory=dict)
    bootstrap_url: str = ""

    def __post_init__(self) -> None:
        self.peer = Peer("prefill", self._prefill, vllm=VERSION)
        self.decode_waits = asyncio.Event()

    @property
    def bootstrap_port(self) -> int:
        """Where its bootstrap server listens."""
        return urlsplit(self.bootstrap_url).port or 0

    @asynccontextmanager
    async def bootstrap(self) -> AsyncIterator[None]:
        """Serve GET /query, as `MooncakeBootstrapServer` does."""

        async def query(request: Request) -> Response:
            entries = {
                str(rank): {"engine_id": name, "worker_addr": {"0": {"0": f"tcp://127.0.0.1:{7000 + rank}"}}}
                for rank, name in enumerate(self.engine_ids)
            }
            return JSONResponse(entries)

        async with serving(Starlette(routes=[Route("/query", query)])) as self.bootstrap_url:
            yield

    async def _prefill(self, peer: Peer, request: Request, body: Any) -> Response:
        params = body["kv_transfer_params"]
        assert params["do_remote_decode"] is True
        assert not params["do_remote_prefill"]
        assert params["transfer_id"]
        assert (body["max_tokens"], body["stream"]) == (1, False)
        ends_by_length = body.get("ignore_eos") is True and not body.get("stop_token_ids")
        assert ends_by_length, "a stop token would end the request, and P would keep nothing"
        rank = int(request.headers.get("x-data-parallel-rank", 0))
        if self.at_once:
            await self.decode_waits.wait()
        _, ready = self.sends.setdefault(params["transfer_id"], (self.engine_ids[rank], asyncio.Event()))
        assert self.sends[params["transfer_id"]][0] == self.engine_ids[rank], "D asked another of P's engines"
        ready.set()
        return JSONResponse({"choices": [{"text": "dropped"}], "kv_transfer_params": None})

    async def decode(self, peer: Peer, request: Request, body: Any) -> Response:
        """D: looks P's engine up, then waits until P has the KV of the transfer."""
        params = body["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert not params["do_remote_decode"]
        async with aiohttp.ClientSession() as session, session.get(params["remote_bootstrap_addr"] + "/query") as found:
            engines = {entry["engine_id"] for entry in (await found.json()).values()}
        if params["remote_engine_id"] not in engines:
            return JSONResponse({"error": {"message": "remote engine_id not found"}}, status_code=500)
        entry = self.sends.setdefault(params["transfer_id"], (params["remote_engine_id"], asyncio.Event()))
        assert entry[0] == params["remote_engine_id"]
        self.decode_waits.set()
        await entry[1].wait()
        return await answer(peer, request, body)
