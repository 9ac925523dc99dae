"""The controller's client of a fleet's routers: declares the instances to them, and reads their states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import KvferryError
from kvferry.core.keys import http_secret
from kvferry.core.messages.traffic import PLAN_PATH, TRAFFIC_PATH, FleetPlan, TrafficReport
from kvferry.core.peer_message import PeerMessage
from kvferry.fleet.control.backend import Member
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient

logger = logging.getLogger(__name__)

_PATH = "/kvferry/instances"
Answered = TypeVar("Answered")
_ASK_S, _SILENT_ROUTER_S = 5.0, 1.0
"""Maximum seconds for a reply; and for a reply of a router that did not answer the last time, because a router that
hangs must not delay the others."""


class ReportedLimits(PeerMessage, frozen=True):
    """The limits that an instance reports, as far as the fleet needs them."""

    num_kv_tokens: int = 0
    max_num_seqs: int = 0


class RouterInstanceView(PeerMessage, frozen=True):
    """An instance, as a router sees it. `in_flight`: that router's running requests there; `no_hand_off`: the reason
    why it takes part in no hand-off, empty if it does."""

    name: str
    role: str
    state: str
    in_flight: int
    draining: bool
    drained: bool
    facts: ReportedLimits | None = None
    url: str = ""
    no_hand_off: str = ""


def capacity_of(views: Iterable[RouterInstanceView]) -> DecodeCapacity:
    """The capacity of one of these decode instances, as far as they have reported it."""
    capacities = (view.facts for view in views if view.role == "decode" and view.facts is not None)
    return DecodeCapacity.smallest((facts.num_kv_tokens, facts.max_num_seqs) for facts in capacities)


class _InstanceList(msgspec.Struct):
    instances: list[RouterInstanceView]


class RouterClient:
    """Owns the connections to the routers. All its requests are signed for operators."""

    max_bytes = 64 * 2**20

    def __init__(self, token: str = "") -> None:
        """`token`: the fleet's token. Default: the token in this process's environment, or this user's token."""
        self._http = HttpClient(client_name="the fleet's controller")
        self._client = SignedClient(self._http, token or http_secret())
        self._silent = set[str]()
        """Routers that did not answer the last declaration, while others did."""
        self._refused: dict[str, str] = {}
        """The last refusal of each router; each is logged once."""

    async def __aenter__(self) -> RouterClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(None, None, None)

    async def rejection_reason(self, router: str) -> str:
        """The reason why a router rejects this process; empty: it does not."""
        try:
            stranger = await self._client.rejection_reason(Origin.parse(router), _ASK_S)
        except KvferryError:
            return ""  # it may hang, which is detected later
        return f"does not take orders: {stranger}" if stranger else ""

    async def views(self, router: str) -> Mapping[str, RouterInstanceView] | None:
        """The router's instances, by name; None if it does not answer."""
        return await self._ask(router, "GET", None)

    async def traffic(self, router: str, seconds: float, limit: int) -> TrafficReport | None:
        """The router's traffic report of the last `limit` requests within `seconds`; None if it does not answer."""
        return await self._get(router, f"{TRAFFIC_PATH}?seconds={seconds:.0f}&limit={limit}", TrafficReport)

    async def plan(self, router: str) -> FleetPlan | None:
        """The plan that the router has received last; None: none, or it does not answer."""
        return await self._get(router, PLAN_PATH, FleetPlan)

    async def send_plan(self, router: str, plan: FleetPlan) -> Mapping[str, RouterInstanceView] | None:
        """Send the plan of a fleet whose instances others start. Returns the router's instances, by name; None if it
        does not answer."""
        return await self._ask(router, "PUT", msgspec.json.encode({"plan": plan}))

    async def declare(
        self,
        routers: Sequence[str],
        instances: Iterable[Member],
        draining: Iterable[str],
        plan: FleetPlan | None = None,
    ) -> Mapping[str, RouterInstanceView] | None:
        """Declare the instances and the plan to all routers, because a replaced router may not share the state of the
        others. `routers`: their URLs. Returns their merged views of the instances, by name; None if none answers."""
        leaving = set(draining)
        declared = [
            {
                "name": instance.name,
                "role": "prefill" if instance.role == "prefill" else "decode",
                "url": instance.url,
                "bootstrap_port": instance.bootstrap_port,
                "unit": instance.unit,
                "revision": instance.revision,
                "draining": instance.name in leaving,
            }
            for instance in instances
        ]
        body = msgspec.json.encode({"instances": declared, "plan": plan})
        answers = await asyncio.gather(*(self._ask(router, "PUT", body) for router in routers))
        silent = {router for router, views in zip(routers, answers, strict=True) if views is None}
        self._silent = silent if len(silent) < len(routers) else set()
        return _merged_views([views for views in answers if views is not None])

    async def _get(self, router: str, target: str, kind: type[Answered]) -> Answered | None:
        origin = Origin.parse(router)
        try:
            status, _, answer = await self._client.ask(
                origin, "GET", target, purpose="operate", timeout_s=_ASK_S, max_bytes=self.max_bytes
            )
            return msgspec.json.decode(answer, type=kind) if status == 200 else None
        except (KvferryError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.debug("the router at %s does not answer: %s", router, error)
            self._client.forget(origin)
            return None

    async def _ask(self, router: str, method: str, body: bytes | None) -> Mapping[str, RouterInstanceView] | None:
        origin, timeout_s = Origin.parse(router), _SILENT_ROUTER_S if router in self._silent else _ASK_S
        try:
            status, _, answer = await self._client.ask(
                origin, method, _PATH, purpose="operate", timeout_s=timeout_s, body=body, max_bytes=self.max_bytes
            )
            if status != 200:
                self._log_refusal(router, f"{method} {_PATH} with {status}: {answer[:300].decode(errors='replace')}")
                return None
            self._refused.pop(router, None)
            return {view.name: view for view in msgspec.json.decode(answer, type=_InstanceList).instances}
        except (KvferryError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.debug("the router at %s does not answer: %s", router, error)
            self._client.forget(origin)
            return None

    def _log_refusal(self, router: str, refusal: str) -> None:
        if self._refused.get(router) != refusal:
            self._refused[router] = refusal
            logger.warning("the router at %s answers %s", router, refusal)


def _merged_views(answers: Sequence[Mapping[str, RouterInstanceView]]) -> Mapping[str, RouterInstanceView] | None:
    """The merged views of several routers: all requests of an instance count, and its worst state."""
    if not answers:
        return None
    seen: dict[str, RouterInstanceView] = {}
    for name, views in ((name, view) for answer in answers for name, view in answer.items()):
        before = seen.get(name)
        seen[name] = views if before is None else _merged_view(before, views)
    return seen


def _merged_view(view: RouterInstanceView, other: RouterInstanceView) -> RouterInstanceView:
    return RouterInstanceView(
        name=view.name,
        role=view.role,
        state=other.state if view.state == "up" else view.state,
        in_flight=view.in_flight + other.in_flight,
        draining=view.draining or other.draining,
        drained=view.drained and other.drained,
        facts=view.facts or other.facts,
        no_hand_off=view.no_hand_off or other.no_hand_off,
    )
