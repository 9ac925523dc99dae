"""The other worker processes of a router, as one of them sees them.

Every tenth of a second, workers tell each other how much work they have given to which instance, and where prompts have
gone. The first worker decides about members: the others forward operators' requests to it, and use the members that it
has. Figures that operators ask for cover all workers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

from msgspec.structs import replace as replace_fields

from kvferry.core.errors import InvalidRequest, TransferError, Unavailable
from kvferry.core.openai import UnknownRoute
from kvferry.http.body import AtMost
from kvferry.http.client import HttpClient
from kvferry.http.headers import find_header
from kvferry.http.keys import Access
from kvferry.http.origin import Origin
from kvferry.http.request import HttpRequest
from kvferry.http.response import JSON, Response
from kvferry.http.routes import Handler, Route, Routes
from kvferry.router.admin import INSTANCES_PATH
from kvferry.router.app import DECISIONS_PATH, Router, wanted_decisions
from kvferry.router.headers import for_client, for_instance
from kvferry.router.instance import Instance, LegRole
from kvferry.router.metrics import CONTENT_TYPE
from kvferry.router.next_turn import Kept
from kvferry.router.policies.base import Asked, Choice
from kvferry.router.prompt import Prefix
from kvferry.router.summed import summed
from kvferry.router.worker_messages import Counts, HeldTicket, KeptNews, Members, Placed, Report, WorkerMember
from kvferry.router.worker_turns import LONGEST_MESSAGE, KeeperElsewhere, answer_for_others, keeper_number

_SECRET = b"x-kvferry-worker"
_MOST_PLACED = 4096
"""Told at once; more are told to nobody, which costs hits in caches and no more."""
_TIMEOUT_S = 5.0
_TURN_S = 1.0
"""For a keeper of tickets; without them, a turn is only computed anew."""
_TURNS_PATH = "/kvferry/worker/turns"
_LONGEST_PASSED_ON = 64 * 1024
_LONGEST = 64 * 2**20


class Siblings:
    """Of worker `number`; number 0 leads."""

    def __init__(self, router: Router, number: int, secret: str) -> None:
        self._router, self._number, self._secret = router, number, secret.encode()
        self._pools, self._chooser = router.services.pools, router.services.chooser
        self._ports: dict[int, int] = {}
        self._counts: dict[int, dict[str, Counts]] = {}
        self._applied: WeakKeyDictionary[Instance, Counts] = WeakKeyDictionary()
        self._placed: deque[Placed] = deque(maxlen=_MOST_PLACED)
        self._members: Members | None = None
        self._version = 0
        self._others: set[int] | None = None
        self._followed: dict[int, int] = {}
        self._told: WeakKeyDictionary[Instance, int] = WeakKeyDictionary()
        self.last_report = Report()
        self._chooser.on_placed = self._note_placed
        self.on_change: Callable[[], object] = lambda: None
        """Called when there is something to report that should not wait."""
        self.on_kept: Callable[[KeptNews], object] = lambda news: None
        """Called for the parent when a ticket is kept for a next turn, or no more."""
        self._stored, self._heard = 0, asyncio.Event()
        self._client = HttpClient()
        self._keepers: dict[int, KeeperElsewhere] = {}
        self._share_turns()
        if self.leads:
            router.membership.all_know = self.all_know
            router.membership.stored = self._until_stored

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(None, None, None)

    def _share_turns(self) -> None:
        services, turns = self._router.services, self._router.services.next_turns
        if turns is None:
            return
        num = services.config.workers
        for number in set(range(num)) - {self._number}:
            self._keepers[number] = KeeperElsewhere(partial(self._ask_keeper, number), turns.own, services.clock)
        own = turns.own
        own.on_change = self._note_kept
        turns.keeper_of = lambda session: self._keepers.get(keeper_number(session, num), own)

    @property
    def leads(self) -> bool:
        """Whether this worker decides about members."""
        return self._number == 0

    # What is told.

    def report(self) -> Report | None:
        """What the others do not know yet; None: nothing is new."""
        counts = {_key(one): self._own(one) for one in self._pools}
        members = self._new_members() if self.leads else None
        placed = list(self._placed)
        self._placed.clear()
        now = Report(counts=counts, followed=self._version)
        if now == self.last_report and not placed and members is None:
            return None
        self.last_report = now
        return Report(counts=counts, placed=placed, members=members, followed=self._version)

    def _own(self, instance: Instance) -> Counts:
        load, others = instance.load, self._applied.get(instance, _NOTHING)
        return Counts(
            instance.in_flight,
            instance.num_tickets,
            load.prefill_tokens - others.prefill_tokens,
            load.num_prefills - others.num_prefills,
            load.num_decodes - others.num_decodes,
        )

    def _new_members(self) -> Members | None:
        leases = {url: lease.process for url, lease in self._router.registrations.leases.items()}
        file_text = self._router.membership.file_text
        now = Members([_as_member(one) for one in self._pools], file_text, self._version, leases)
        if now == self._members:
            return None
        self._version += 1
        self._members = replace_fields(now, version=self._version)
        for instance in self._pools.leaving:
            self._told.setdefault(instance, self._version)
        return self._members

    def _note_placed(self, asked: Asked, choice: Choice[Instance]) -> None:
        prefill = choice.prefill.name if choice.prefill is not None else None
        prefix = asked.prefix
        self._placed.append(Placed(list(prefix.keys), list(prefix.ends), asked.session, prefill, choice.decode.name))

    def _note_kept(self, kept: Kept, is_here: bool) -> None:
        self.on_kept(KeptNews(kept.transfer_id, HeldTicket(kept.decode.url, kept.until) if is_here else None))

    # What is heard.

    def release(self, held: Mapping[str, HeldTicket]) -> None:
        """Have instances free what a lost worker kept there; those that are here."""
        here = {one.url: one for one in self._pools}
        found = [(here[ticket.url], name) for name, ticket in held.items() if ticket.url in here]
        self._router.services.releases.start_all(found)
        for name in held:
            self.on_kept(KeptNews(name, None))

    def meet(self, ports: dict[int, int], starting: Iterable[int] = ()) -> None:
        """Which workers serve now, and at which ports, and which ones are starting."""
        before, self._ports = self._ports, {number: port for number, port in ports.items() if number != self._number}
        for port in {*before.values()} - {*self._ports.values()}:
            self._client.forget(Origin("127.0.0.1", port))
        for number, keeper in self._keepers.items():
            if before.get(number) != self._ports.get(number):
                keeper.is_new()
        self._others = {*ports, *starting} - {self._number}
        self.last_report = Report()  # for who is new

    def hear(self, report: Report) -> None:
        """Take in a report of another worker."""
        if report.members is not None and not self.leads:
            self.follow(report.members)
        self._counts[report.number], self._followed[report.number] = report.counts, report.followed
        for instance in self._pools:
            self._apply(instance)
        by_name = {one.name: one for one in self._pools}
        for placed in report.placed:
            decode, prefill = by_name.get(placed.decode), by_name.get(placed.prefill or "")
            if decode is not None:
                prefix = Prefix(placed.keys, placed.ends)
                self._chooser.placed_elsewhere(prefix, placed.session, prefill, decode)

    def _apply(self, instance: Instance) -> None:
        """Set an instance's load to that of all workers together."""
        key, before, load = _key(instance), self._applied.get(instance, _NOTHING), instance.load
        all_of_it = [counts[key] for counts in self._counts.values() if key in counts]
        now = Counts(
            sum(one.in_flight for one in all_of_it),
            sum(one.num_tickets for one in all_of_it),
            sum(one.prefill_tokens for one in all_of_it),
            sum(one.num_prefills for one in all_of_it),
            sum(one.num_decodes for one in all_of_it),
        )
        self._applied[instance] = now
        instance.in_flight_elsewhere, instance.tickets_elsewhere = now.in_flight, now.num_tickets
        load.prefill_tokens += now.prefill_tokens - before.prefill_tokens
        load.num_prefills += now.num_prefills - before.num_prefills
        load.num_decodes += now.num_decodes - before.num_decodes

    def all_know(self, instance: Instance) -> bool:
        """Whether all others know that an instance is draining, and have reported since then what they have running
        there: one that does not know may still be sending it a request."""
        version = self._told.get(instance)
        if version is None or self._others is None:
            return False
        return all(self._followed.get(number, 0) >= version for number in self._others)

    def follow(self, members: Members) -> None:
        """Use these instances, and no others."""
        self._version = members.version
        self.stored(members.version)  # it comes from the parent
        if self.leads:
            self._router.registrations.take_over(members.leases)
        known = {_identity(one): one for one in self._pools}
        for member in members.instances:
            instance = known.pop(_identity(member), None)
            if instance is None:
                instance = self._pools.pool(member.role).add(member.url, member.bootstrap_port, name=member.name)
            if member.draining:
                self._pools.retire(instance)
            if member.drained:
                instance.is_drained(True)
            instance.leaves_by_itself = member.leaves_by_itself
        for gone in known.values():
            self._pools.retire(gone)
            self._router.membership.forget(gone)

    def stored(self, version: int) -> None:
        """The parent has these members: they outlive this process."""
        self._stored = max(self._stored, version)
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()

    async def _until_stored(self) -> None:
        """What was done about members outlives this process. Raises `Unavailable`."""
        self.on_change()
        version = self._version
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while self._stored < version:
                    await self._heard.wait()
        except TimeoutError as error:
            raise Unavailable(
                "it was done, but the router's first process does not confirm it; ask for the instances, and try again"
            ) from error

    # What is served.

    def routes(self) -> Routes:
        """For clients and operators."""
        table = self._router.table()
        return Routes([replace(one, handler=self._shared(one)) for one in table], self._router.fallback())

    def own_routes(self) -> Routes:
        """For the other workers: what operators may ask, about this worker alone."""
        table = self._router.table()
        if self._keepers:
            table.append(Route("POST", _TURNS_PATH, self._keep_turn))
        return Routes([replace(one, handler=self._for_siblings(one.handler), access=Access.OPEN) for one in table])

    def _shared(self, route: Route) -> Handler:
        if route.path == "/metrics":
            return self.show_metrics
        if route.path == DECISIONS_PATH:
            return self.show_decisions
        return self._pass_on if route.path.startswith(INSTANCES_PATH) and not self.leads else route.handler

    def _for_siblings(self, handler: Handler) -> Handler:
        async def handle(request: HttpRequest, response: Response) -> None:
            if not hmac.compare_digest(find_header(request.headers, _SECRET) or b"", self._secret):
                raise UnknownRoute(f"Invalid URL ({request.method} {request.path[:200]})")
            await handler(request, response)

        return handle

    async def _pass_on(self, request: HttpRequest, response: Response) -> None:
        """Forward the request to the first worker."""
        body = await request.body.read(AtMost(_LONGEST_PASSED_ON, "such a request"))
        headers = for_instance(request.headers, [(_SECRET, self._secret), JSON])
        status, sent, answer = await self._ask(0, request.method, request.target, headers, body)
        kept = [one for one in for_client(sent) if one[0] != b"content-length"]
        response.send(status, answer, kept)

    async def _keep_turn(self, request: HttpRequest, response: Response) -> None:
        """POST of another worker: about a conversation whose tickets are kept here."""
        turns = self._router.services.next_turns
        assert turns is not None
        message = await request.body.read(AtMost(LONGEST_MESSAGE, "a message about a turn"))
        response.send_json(await answer_for_others(turns.own, message))

    async def _ask_keeper(self, number: int, message: bytes) -> bytes:
        """Ask worker `number`, which keeps the conversation, within `_TURN_S`; returns its answer.

        Raises `InvalidRequest` where it refuses the message, `Unavailable` and errors of the connection otherwise.
        """
        headers = [(_SECRET, self._secret), JSON]
        status, _, answer = await self._client.ask(
            self._origin(number), "POST", _TURNS_PATH, timeout_s=_TURN_S, headers=headers, body=message
        )
        if 400 <= status < 500:
            raise InvalidRequest(f"worker {number} answered {status}")
        if status != 200:
            raise Unavailable(f"worker {number} answered {status}")
        return answer

    async def show_metrics(self, request: HttpRequest, response: Response) -> None:
        """GET /metrics: of all workers together."""
        texts = await self._ask_all("/metrics")
        text = await asyncio.to_thread(summed, [self._router.metrics_text(), *texts])
        text += await self._router.instances_metrics(request)
        response.send(200, text, [(b"content-type", CONTENT_TYPE.encode())])

    async def show_decisions(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/decisions?limit=100: the last of all workers, the newest first."""
        limit = wanted_decisions(request)
        own = self._chooser.decisions.encode(limit)
        found = [one for text in (own, *await self._ask_all(f"{request.path}?limit={limit}")) for one in _told(text)]
        found.sort(key=lambda one: one["timings"].get("routed") or 0.0, reverse=True)
        response.send_json(json.dumps({"decisions": found[:limit]}).encode())

    async def _ask_all(self, target: str) -> list[bytes]:
        """The bodies of those other workers that answer with 200."""
        answers = await asyncio.gather(
            *(self._ask(number, "GET", target, [(_SECRET, self._secret)]) for number in self._ports),
            return_exceptions=True,
        )
        return [one[2] for one in answers if not isinstance(one, BaseException) and one[0] == 200]

    async def _ask(
        self, number: int, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes | None = None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Raises `Unavailable`."""
        try:
            return await self._client.ask(
                self._origin(number),
                method,
                target,
                timeout_s=_TIMEOUT_S,
                headers=headers,
                body=body or None,
                max_bytes=_LONGEST,
            )
        except TransferError as error:
            raise Unavailable("a worker of the router does not answer; try again") from error

    def _origin(self, number: int) -> Origin:
        """Raises `Unavailable`."""
        port = self._ports.get(number)
        if port is None:
            raise Unavailable(f"worker {number} of the router is starting; try again")
        return Origin("127.0.0.1", port)


_NOTHING = Counts()


def _key(instance: Instance) -> str:
    return f"{instance.name} {instance.url}"


def _identity(one: Instance | WorkerMember) -> tuple[str, LegRole, str, int]:
    """Identifies an instance; names alone do not, because a process that starts later assigns them again."""
    return one.name, one.role, one.url, one.bootstrap_port


def _as_member(one: Instance) -> WorkerMember:
    return WorkerMember(
        one.name, one.role, one.url, one.bootstrap_port, one.draining, one.drained, one.leaves_by_itself
    )


def _told(text: bytes) -> list[dict[str, dict[str, float]]]:
    return list(json.loads(text)["decisions"])
