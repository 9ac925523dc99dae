"""What becomes of a request when an instance fails, as one table: form of the hand-off × who fails × how.

There are two prefill and two decode instances. `a prefill` fails the first request that any prefill instance gets,
`every prefill` all of them. A row of the table says what each of the four was sent (`prefill`, D's `early` ticket
before P has answered, P's `ticket`, SGLang's `room`, the `whole` request, a request that has D `give-up` a ticket),
which P was told to release a hand-off, and what the client got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from router.peers import (
    CONCURRENT,
    DECODE,
    Peer,
    Streaming,
    answer,
    cut,
    cut_in_stream,
    event,
    failing,
    go_or_disconnect,
    instances,
    routing,
    ticket_for,
)
from router.protocols.test_sglang import SglangPeer
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}
Fault = Callable[[Peer, Request, Any], Awaitable[Response]]


async def silent(peer: Peer, request: Request, body: Any) -> Response:
    """No answer, for as long as the caller waits."""
    await go_or_disconnect(peer, request)
    raise ClientDisconnect


async def stops(peer: Peer, request: Request, body: Any) -> Response:
    """The head, and then nothing, for as long as the caller waits."""
    return Streaming(peer, request, [event("one")] if body.get("stream") else [b"{"], [])


async def half(peer: Peer, request: Request, body: Any) -> Response:
    """Less of an answer than its length says."""
    return Response(b"{", headers={"content-length": "100", "content-type": "application/json"})


async def error_event(peer: Peer, request: Request, body: Any) -> Response:
    """A stream that the instance itself ends with an error."""
    told = b'data: {"error": {"message": "no", "type": "server_error"}}\n\n'
    return Streaming(peer, request, [event("one"), told, b"data: [DONE]\n\n"], [])


async def nonsense(peer: Peer, request: Request, body: Any) -> Response:
    """No JSON."""
    return Response(b"{", media_type="application/json")


async def no_ticket(peer: Peer, request: Request, body: Any) -> Response:
    """P has computed, and keeps nothing."""
    return JSONResponse({"choices": [{"text": "x"}]})


async def wrong_ticket(peer: Peer, request: Request, body: Any) -> Response:
    """P names another hand-off."""
    return JSONResponse({"choices": [], "kv_transfer_params": {**ticket_for(peer, body), "transfer_id": "another"}})


async def refuses(peer: Peer, request: Request, body: Any) -> Response:
    """Never called: nobody listens there."""
    raise AssertionError


DYNAMO: dict[str, Any] = {
    **{"stack": "dynamo", "connector": "Dynamo", "kv_host": "", "kv_port": 0, "kv_seal": ""},
    "tickets": {"writes": ["dynamo"], "reads": ["dynamo"]},
}
"""What kvferry's server for a worker of Dynamo's has in its facts, where kvferry's engine has other values."""

FAULTS: dict[str, Fault] = {
    "refuses": refuses,
    "silent": silent,
    "stops": stops,
    "cut": cut,
    "half": half,
    "500": failing(500),
    "503": failing(503, **{"Retry-After": "0"}),
    "400": failing(400),
    "307": failing(307, Location="http://127.0.0.1:1/"),
    "nonsense": nonsense,
    "no ticket": no_ticket,
    "wrong ticket": wrong_ticket,
    "cut in stream": cut_in_stream,
    "error event": error_event,
}


@dataclass
class Fleet:
    """Two P and two D of one form. `faulty`: who fails, `fault`: how. `ready`: the hand-offs of which P has the KV."""

    form: str
    faulty: str
    fault: str
    ready: dict[str, asyncio.Event] = field(default_factory=dict)
    failed: bool = False

    def __post_init__(self) -> None:
        self.prefills = [self._peer("prefill", number) for number in range(2)]
        self.decodes = [self._peer("decode", number) for number in range(2)]

    def _peer(self, role: str, number: int) -> Peer:
        own = self._prefill if role == "prefill" else self._decode
        if self.form == "room":
            return SglangPeer(role, own, mode=role)
        if self.form == "nixl":
            return Peer(role, own, vllm="0.32.0")
        facts = CONCURRENT if role == "prefill" else DECODE
        if self.form == "dynamo":
            facts = {**facts, **DYNAMO}
        return Peer(role, own, facts={**facts, "engine_id": f"engine-{role}-{number}"})

    def _fails(self, peer: Peer) -> bool:
        number, role = self.faulty.split()
        if peer.role != role or self.fault == "refuses" or (self.failed and number == "a"):
            return False
        self.failed = True
        return True

    def _of(self, body: Any) -> asyncio.Event:
        """Set when P has the KV of this hand-off."""
        params = body.get("kv_transfer_params") or {}
        return self.ready.setdefault(str(params.get("transfer_id") or body.get("bootstrap_room")), asyncio.Event())

    async def _prefill(self, peer: Peer, request: Request, body: Any) -> Response:
        if self._fails(peer):
            return await FAULTS[self.fault](peer, request, body)
        if kind(body) == "whole":
            return await answer(peer, request, body)
        self._of(body).set()
        if self.form == "room":
            return JSONResponse({"choices": []})
        params = ticket_for(peer, {"seed": 0, **body})
        return JSONResponse({"choices": [{"text": "x"}], "kv_transfer_params": params})

    async def _decode(self, peer: Peer, request: Request, body: Any) -> Response:
        if kind(body) == "give-up":
            return await failing(404)(peer, request, body)
        if self._fails(peer):
            return await FAULTS[self.fault](peer, request, body)
        if kind(body) in ("early", "room"):
            peer.go = self._of(body)
            if not await go_or_disconnect(peer, request):
                raise ClientDisconnect
        return await answer(peer, request, body)


def kind(body: Any) -> str:
    """What a leg is sent."""
    params = body.get("kv_transfer_params")
    if body["model"] != "m":
        return "give-up"
    if "bootstrap_room" in body:
        return "room"
    if not params:
        return "whole"
    if params["do_remote_decode"]:
        return "prefill"
    return "ticket" if "prefill_result" in params else "early"


def called(peer: Peer) -> str:
    """All that an instance was sent."""
    return "+".join(kind(call.body) for call in peer.calls) or "-"


async def outcome(form: str, faulty: str, fault: str) -> str:
    """The row of this table, but for what fails."""
    fleet = Fleet(form, faulty, fault)
    everyone = [*fleet.prefills, *fleet.decodes]
    settings: dict[str, Any] = {
        "hand_off": form if form in ("sequential", "concurrent") else "auto",
        "disaggregate_from": "0",
        "first_byte_timeout_s": 0.5,
        "between_bytes_timeout_s": 0.5,
        "continuations": 0,
    }
    async with instances(*everyone):
        urls = [[one.url for one in some] for some in (fleet.prefills, fleet.decodes)]
        async with routing(*urls, **settings) as (router, url), aiohttp.ClientSession() as session:
            if fault == "refuses":
                number, role = faulty.split()
                gone = fleet.prefills if role == "prefill" else fleet.decodes
                for peer in gone if number == "every" else gone[:1]:
                    await peer.close()
            got = await ask(session, url, stream=fault not in WHOLE)
            await eventually(lambda: not router.services.releases.num_running)
        released = [f"p{number}" for number, one in enumerate(fleet.prefills) for _ in range(one.released.qsize())]
    return f"{' '.join(map(called, everyone))} | {' '.join(released) or '-'} | {got}"


async def ask(session: aiohttp.ClientSession, url: str, *, stream: bool) -> str:
    """What the client gets."""
    try:
        async with session.post(url + "/v1/completions", json={**BODY, "stream": stream}) as response:
            text = await response.read()
    except aiohttp.ClientError:
        return "cut"
    if response.status != 200:
        return str(response.status)
    if b'"error"' in text:
        return "error event"
    return "answer" if b"done" in text or text.endswith(b"data: [DONE]\n\n") else text.decode(errors="replace")


BROKEN = "silent, stops, cut, half, 500, 503, 307, nonsense, wrong ticket"
TABLE = """
sequential | a prefill     | refuses                           | - prefill - ticket                | -     | answer
sequential | a prefill     | BROKEN                            | prefill prefill - ticket          | p0    | answer
sequential | a prefill     | 400                               | prefill - - -                     | -     | 400
sequential | a prefill     | no ticket                         | prefill - whole -                 | -     | answer
sequential | every prefill | refuses                           | - - whole -                       | -     | answer
sequential | every prefill | BROKEN                            | prefill prefill whole -           | p0 p1 | answer
sequential | every prefill | 400                               | prefill - - -                     | -     | 400
sequential | every prefill | no ticket                         | prefill - whole -                 | -     | answer
sequential | a decode      | refuses                           | prefill - - ticket                | -     | answer
sequential | a decode      | silent, cut, 500, 503, 307        | prefill - ticket ticket           | -     | answer
sequential | a decode      | stops, cut in stream, error event | prefill - ticket -                | p0    | error event
sequential | a decode      | half                              | prefill - ticket -                | p0    | cut
sequential | a decode      | 400                               | prefill - ticket -                | p0    | 400
sequential | every decode  | silent                            | prefill - ticket ticket           | p0    | 504
sequential | every decode  | cut                               | prefill - ticket ticket           | p0    | 502
sequential | every decode  | 500                               | prefill - ticket ticket           | p0    | 500
sequential | every decode  | 503                               | prefill - ticket ticket           | p0    | 503
sequential | every decode  | 307                               | prefill - ticket ticket           | p0    | 502
sequential | every decode  | refuses                           | prefill - - -                     | p0    | 503
nixl, dynamo | a prefill     | refuses                           | - prefill - ticket                | -   | answer
nixl, dynamo | a prefill     | BROKEN                            | prefill prefill - ticket          | -   | answer
nixl, dynamo | a prefill     | 400                               | prefill - - -                     | -   | 400
nixl, dynamo | a prefill     | no ticket                         | prefill - whole -                 | -   | answer
nixl, dynamo | every prefill | refuses                           | - - whole -                       | -   | answer
nixl, dynamo | every prefill | BROKEN                            | prefill prefill whole -           | -   | answer
nixl, dynamo | every prefill | 400                               | prefill - - -                     | -   | 400
nixl, dynamo | every prefill | no ticket                         | prefill - whole -                 | -   | answer
nixl, dynamo | a decode      | refuses                           | prefill - - ticket                | -   | answer
nixl, dynamo | a decode      | silent, cut, 500, 503, 307        | prefill - ticket ticket           | -   | answer
nixl, dynamo | a decode      | stops, cut in stream, error event | prefill - ticket -                | -   | error event
nixl, dynamo | a decode      | half                              | prefill - ticket -                | -   | cut
nixl, dynamo | a decode      | 400                               | prefill - ticket -                | -   | 400
nixl, dynamo | every decode  | silent                            | prefill - ticket+give-up ticket   | -   | 504
nixl, dynamo | every decode  | cut                               | prefill - ticket+give-up ticket   | -   | 502
nixl, dynamo | every decode  | 500                               | prefill - ticket ticket           | -   | 500
nixl, dynamo | every decode  | 503                               | prefill - ticket ticket           | -   | 503
nixl, dynamo | every decode  | 307                               | prefill - ticket ticket           | -   | 502
nixl, dynamo | every decode  | refuses                           | prefill - - -                     | -   | 503
concurrent | a prefill     | refuses                           | - prefill early early             | -     | answer
concurrent | a prefill     | BROKEN                            | prefill prefill early early       | p0    | answer
concurrent | a prefill     | 400                               | prefill - early -                 | -     | 400
concurrent | a prefill     | no ticket                         | prefill prefill early early       | -     | answer
concurrent | every prefill | refuses                           | - - early+whole early             | -     | answer
concurrent | every prefill | BROKEN                            | prefill prefill early+whole early | p0 p1 | answer
concurrent | every prefill | 400                               | prefill - early -                 | -     | 400
concurrent | every prefill | no ticket                         | prefill prefill early+whole early | -     | answer
concurrent | a decode      | refuses                           | prefill - - ticket                | -     | answer
concurrent | a decode      | silent, cut, 500, 503, 307        | prefill - early ticket            | -     | answer
concurrent | a decode      | stops, cut in stream, error event | prefill - early -                 | p0    | error event
concurrent | a decode      | half                              | prefill - early -                 | p0    | cut
concurrent | a decode      | 400                               | prefill - early -                 | p0    | 400
concurrent | every decode  | silent                            | prefill - early ticket            | p0    | 504
concurrent | every decode  | cut                               | prefill - early ticket            | p0    | 502
concurrent | every decode  | 500                               | prefill - early ticket            | p0    | 500
concurrent | every decode  | 503                               | prefill - early ticket            | p0    | 503
concurrent | every decode  | 307                               | prefill - early ticket            | p0    | 502
concurrent | every decode  | refuses                           | prefill - - -                     | p0    | 503
room       | a prefill     | refuses                           | - room room room                  | -     | answer
room       | a prefill     | BROKEN                            | room room room room               | -     | answer
room       | a prefill     | 400                               | room - room -                     | -     | 400
room       | every prefill | refuses                           | - - room room                     | -     | 503
room       | every prefill | silent                            | room room room room               | -     | 504
room       | every prefill | BROKEN but silent                 | room room room room               | -     | 503
room       | every prefill | 400                               | room - room -                     | -     | 400
room       | a decode      | refuses                           | room+room - - room                | -     | answer
room       | a decode      | silent, cut, 500, 503, 307        | room+room - room room             | -     | answer
room       | a decode      | stops, cut in stream, error event | room - room -                     | -     | error event
room       | a decode      | half                              | room - room -                     | -     | cut
room       | a decode      | 400                               | room - room -                     | -     | 400
room       | every decode  | silent                            | room+room - room room             | -     | 504
room       | every decode  | cut                               | room+room - room room             | -     | 502
room       | every decode  | 500, 307                          | room+room - room room             | -     | 503
room       | every decode  | 503                               | room+room - room room             | -     | 503
room       | every decode  | refuses                           | room+room - - -                   | -     | 503
"""
WHOLE = ("half",)
"""Faults of answers that are no streams."""


def rows() -> list[tuple[str, str, str, str]]:
    """Form, who fails, how, and what comes of it."""
    found = []
    for line in TABLE.strip().splitlines():
        forms, faulty, faults, *row = (part.strip() for part in line.split("|"))
        faults, _, others = faults.replace("BROKEN", BROKEN).partition(" but ")
        names = [name for name in map(str.strip, faults.split(",")) if name != others]
        found += [(form, faulty, name, " | ".join(row)) for form in forms.split(", ") for name in names]
    return found


QUICK = {
    ("concurrent", "a prefill"),
    ("concurrent", "a decode"),
    ("sequential", "a decode"),
    ("nixl", "a prefill"),
    ("dynamo", "a decode"),
}
CASES = [
    pytest.param(*row, marks=[] if row[:2] in QUICK else [pytest.mark.full], id=" ".join(row[:3])) for row in rows()
]


@pytest.mark.parametrize(("form", "faulty", "fault", "row"), CASES)
async def test_what_becomes_of_a_request(form: str, faulty: str, fault: str, row: str) -> None:
    found = await outcome(form, faulty, fault)
    assert " ".join(found.split()) == " ".join(row.split())


def test_every_fault_is_in_the_table() -> None:
    assert {fault for _, _, fault, _ in rows()} == FAULTS.keys()
    assert len({row[:3] for row in rows()}) == len(rows())
