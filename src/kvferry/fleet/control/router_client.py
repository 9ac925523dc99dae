"""The routers of a fleet, as its controller sees them: it declares the instances, and is told how they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import KvferryError
from kvferry.core.keys import http_secret
from kvferry.core.messages.traffic import PLAN_PATH, TRAFFIC_PATH, FleetPlan, TrafficReport
from kvferry.fleet.control.backend import Member
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient

logger = logging.getLogger(__name__)

_PATH = "/kvferry/instances"
Answered = TypeVar("Answered")
_ASK_S, _ASK_AGAIN_S = 5.0, 1.0
"""How long an answer is waited for; and that of a router that did not answer last, so that one that hangs keeps nobody
from looking after the others."""
_MAX_BYTES = 64 * 2**20


class ViewedFacts(msgspec.Struct, frozen=True):
    """What an instance says about itself, as far as the fleet needs it."""

    num_kv_tokens: int = 0
    max_num_seqs: int = 0


class View(msgspec.Struct, frozen=True):
    """An instance, as a router sees it; `in_flight`: requests of that router which run there; `no_hand_off`: why it
    takes part in no hand-off, empty if it does."""

    name: str
    role: str
    state: str
    in_flight: int
    draining: bool
    drained: bool
    facts: ViewedFacts | None = None
    url: str = ""
    no_hand_off: str = ""


def capacity_of(views: Iterable[View]) -> DecodeCapacity:
    """What one of these decode instances takes, as far as they have said so."""
    told = (one.facts for one in views if one.role == "decode" and one.facts is not None)
    return DecodeCapacity.least((one.num_kv_tokens, one.max_num_seqs) for one in told)


class _Shown(msgspec.Struct):
    instances: list[View]


class RouterClient:
    """Owns the connections to the routers. Everything it asks for is signed for operators."""

    def __init__(self, token: str = "") -> None:
        """`token`: the fleet's; default: that of this process's environment, or of this user."""
        self._http = HttpClient(client_name="the fleet's controller")
        self._client = SignedClient(self._http, token or http_secret())
        self._silent = set[str]()
        """Routers that did not answer when they were last asked, while others did."""
        self._refused: dict[str, str] = {}
        """What routers answered last instead of what they were asked for; each of it is logged once."""

    async def __aenter__(self) -> RouterClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(None, None, None)

    async def why_not(self, router: str) -> str:
        """Why this process and a router do not know each other; empty if they do."""
        try:
            stranger = await self._client.rejection_reason(Origin.parse(router), _ASK_S)
        except KvferryError:
            return ""  # it may be hung, which is seen later
        return f"does not take orders: {stranger}" if stranger else ""

    async def views(self, router: str) -> Mapping[str, View] | None:
        """The instances that this router knows, by name; None if it does not answer."""
        return await self._ask(router, "GET", None)

    async def traffic(self, router: str, seconds: float, most: int) -> TrafficReport | None:
        """What this router has seen of the last `most` requests within `seconds`; None if it does not answer."""
        return await self._get(router, f"{TRAFFIC_PATH}?seconds={seconds:.0f}&limit={most}", TrafficReport)

    async def plan(self, router: str) -> FleetPlan | None:
        """What this router was told last that the fleet is to be; None: nothing, or it does not answer."""
        return await self._get(router, PLAN_PATH, FleetPlan)

    async def tell(self, router: str, plan: FleetPlan) -> Mapping[str, View] | None:
        """Tell a router what the fleet is to be, whose instances somebody else starts. Returns those that it knows, by
        name; None if it does not answer."""
        return await self._ask(router, "PUT", msgspec.json.encode({"plan": plan}))

    async def declare(
        self,
        routers: Sequence[str],
        instances: Iterable[Member],
        draining: Iterable[str],
        plan: FleetPlan | None = None,
    ) -> Mapping[str, View] | None:
        """Tell the routers which instances there are, and what the fleet is to be. `routers`: their URLs; each is told,
        as one that was replaced may no longer share what the others know. Returns how they see the instances, by name;
        None if none answers."""
        leaving = set(draining)
        wanted = [
            {
                "name": one.name,
                "role": "prefill" if one.role == "prefill" else "decode",
                "url": one.url,
                "bootstrap_port": one.bootstrap_port,
                "unit": one.unit,
                "draining": one.name in leaving,
            }
            for one in instances
        ]
        body = msgspec.json.encode({"instances": wanted, "plan": plan})
        answers = await asyncio.gather(*(self._ask(router, "PUT", body) for router in routers))
        silent = {router for router, one in zip(routers, answers, strict=True) if one is None}
        self._silent = silent if len(silent) < len(routers) else set()
        return _together([one for one in answers if one is not None])

    async def _get(self, router: str, target: str, kind: type[Answered]) -> Answered | None:
        origin = Origin.parse(router)
        try:
            status, _, answer = await self._client.ask(
                origin, "GET", target, purpose="operate", timeout_s=_ASK_S, max_bytes=_MAX_BYTES
            )
            return msgspec.json.decode(answer, type=kind) if status == 200 else None
        except (KvferryError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.debug("the router at %s does not answer: %s", router, error)
            self._client.forget(origin)
            return None

    async def _ask(self, router: str, method: str, body: bytes | None) -> Mapping[str, View] | None:
        origin, within_s = Origin.parse(router), _ASK_AGAIN_S if router in self._silent else _ASK_S
        try:
            status, _, answer = await self._client.ask(
                origin, method, _PATH, purpose="operate", timeout_s=within_s, body=body, max_bytes=_MAX_BYTES
            )
            if status != 200:
                self._refuses(router, f"{method} {_PATH} with {status}: {answer[:300].decode(errors='replace')}")
                return None
            self._refused.pop(router, None)
            return {one.name: one for one in msgspec.json.decode(answer, type=_Shown).instances}
        except (KvferryError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.debug("the router at %s does not answer: %s", router, error)
            self._client.forget(origin)
            return None

    def _refuses(self, router: str, how: str) -> None:
        if self._refused.get(router) != how:
            self._refused[router] = how
            logger.warning("the router at %s answers %s", router, how)


def _together(answers: Sequence[Mapping[str, View]]) -> Mapping[str, View] | None:
    """How several routers see the instances: all requests of an instance count, and it is as the worst of them says."""
    if not answers:
        return None
    seen: dict[str, View] = {}
    for name, one in ((name, one) for answer in answers for name, one in answer.items()):
        before = seen.get(name)
        seen[name] = one if before is None else _worse(before, one)
    return seen


def _worse(one: View, other: View) -> View:
    return View(
        name=one.name,
        role=one.role,
        state=other.state if one.state == "up" else one.state,
        in_flight=one.in_flight + other.in_flight,
        draining=one.draining or other.draining,
        drained=one.drained and other.drained,
        facts=one.facts or other.facts,
        no_hand_off=one.no_hand_off or other.no_hand_off,
    )
