"""The other worker processes of a router, as one of them sees them.

What is done is shared: who was given how much to do, and where prompts have gone, is told every tenth of a second. What
is decided about members is the first worker's: the others pass operators on to it, and have the members that it has.
Figures that operators ask for are those of all.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

from kvferry.core.errors import TransferError, Unavailable
from kvferry.core.openai import UnknownRoute
from kvferry.http.client import Deadlines, HttpClient
from kvferry.http.headers import find_header
from kvferry.http.keys import Access
from kvferry.http.origin import Origin
from kvferry.http.request import Request
from kvferry.http.response import JSON, Response
from kvferry.http.routes import Handler, Route, Routes
from kvferry.router.admin import INSTANCES_PATH
from kvferry.router.app import DECISIONS_PATH, Router, wanted_decisions
from kvferry.router.headers import for_client, for_instance
from kvferry.router.instance import Instance, LegRole
from kvferry.router.metrics import CONTENT_TYPE
from kvferry.router.policies.base import Asked, Choice
from kvferry.router.prompt import Prefix
from kvferry.router.summed import summed
from kvferry.router.worker_messages import Counts, Members, Placed, Report, WorkerMember

_SECRET = b"x-kvferry-worker"
_MOST_PLACED = 4096
"""Told at once; more are told to nobody, which costs hits in caches and no more."""
_TIMEOUT_S = 5.0
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
        if self.leads:
            router.membership.all_know = self.all_know

    @property
    def leads(self) -> bool:
        """Whether members are this worker's to decide."""
        return self._number == 0

    # What is told.

    def report(self) -> Report | None:
        """What the others should know by now; None: nothing that is new."""
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
        now = Members([_as_member(one) for one in self._pools], self._router.membership.file_text, self._version)
        if now == self._members:
            return None
        self._version += 1
        self._members = Members(now.instances, now.file_text, self._version)
        for instance in self._pools.leaving:
            self._told.setdefault(instance, self._version)
        return self._members

    def _note_placed(self, asked: Asked, choice: Choice[Instance]) -> None:
        prefill = choice.prefill.name if choice.prefill is not None else None
        prefix = asked.prefix
        self._placed.append(Placed(list(prefix.keys), list(prefix.ends), asked.session, prefill, choice.decode.name))

    # What is heard.

    def meet(self, ports: dict[int, int], starting: Iterable[int] = ()) -> None:
        """Who serves now, and where, and who soon will."""
        self._ports = {number: port for number, port in ports.items() if number != self._number}
        self._others = {*ports, *starting} - {self._number}
        self.last_report = Report()  # for who is new

    def hear(self, report: Report) -> None:
        """Of another worker."""
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
        """Have an instance's load be that of all workers."""
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
        """Whether all others have been told that an instance is drained, and have said since what they do there: one
        that does not know may be giving it a request."""
        version = self._told.get(instance)
        if version is None or self._others is None:
            return False
        return all(self._followed.get(number, 0) >= version for number in self._others)

    def follow(self, members: Members) -> None:
        """Have these instances, and no others."""
        self._version = members.version
        known = {_identity(one): one for one in self._pools}
        for member in members.instances:
            instance = known.pop(_identity(member), None)
            if instance is None:
                instance = self._pools.pool(member.role).add(member.url, member.bootstrap_port, name=member.name)
            if member.draining:
                self._pools.retire(instance)
            instance.drained, instance.leaves_by_itself = member.drained, member.leaves_by_itself
        for gone in known.values():
            self._pools.retire(gone)
            self._router.membership.forget(gone)

    # What is served.

    def routes(self) -> Routes:
        """To clients and operators."""
        table = self._router.table()
        return Routes([replace(one, handler=self._shared(one)) for one in table], self._router.fallback())

    def own_routes(self) -> Routes:
        """To the other workers: what operators may ask, of this worker alone."""
        return Routes(
            [replace(one, handler=self._for_siblings(one.handler), access=Access.OPEN) for one in self._router.table()]
        )

    def _shared(self, route: Route) -> Handler:
        if route.path == "/metrics":
            return self.show_metrics
        if route.path == DECISIONS_PATH:
            return self.show_decisions
        if not route.path.startswith(INSTANCES_PATH):
            return route.handler
        return self._then_told(route.handler) if self.leads else self._pass_on

    def _then_told(self, handler: Handler) -> Handler:
        """What was done about members is told at once: this process may be lost at any moment."""

        async def handle(request: Request, response: Response) -> None:
            try:
                await handler(request, response)
            finally:
                self.on_change()

        return handle

    def _for_siblings(self, handler: Handler) -> Handler:
        handler = self._then_told(handler)

        async def handle(request: Request, response: Response) -> None:
            if not hmac.compare_digest(find_header(request.headers, _SECRET) or b"", self._secret):
                raise UnknownRoute(f"Invalid URL ({request.method} {request.path[:200]})")
            await handler(request, response)

        return handle

    async def _pass_on(self, request: Request, response: Response) -> None:
        """To the first worker."""
        body = await request.body.read()
        headers = for_instance(request.headers, [(_SECRET, self._secret), JSON])
        status, sent, answer = await self._ask(0, request.method, request.target, headers, body)
        kept = [one for one in for_client(sent) if one[0] != b"content-length"]
        response.send(status, answer, kept)

    async def show_metrics(self, request: Request, response: Response) -> None:
        """GET /metrics: of all workers together."""
        texts = await self._ask_all("/metrics")
        text = await asyncio.to_thread(summed, [self._router.metrics_text(), *texts])
        text += await self._router.instances_metrics(request)
        response.send(200, text, [(b"content-type", CONTENT_TYPE.encode())])

    async def show_decisions(self, request: Request, response: Response) -> None:
        """GET /kvferry/decisions?limit=100: the last of all workers, the newest first."""
        limit = wanted_decisions(request)
        own = self._chooser.decisions.encode(limit)
        found = [one for text in (own, *await self._ask_all(f"{request.path}?limit={limit}")) for one in _told(text)]
        found.sort(key=lambda one: one["timings"].get("routed") or 0.0, reverse=True)
        response.send_json(json.dumps({"decisions": found[:limit]}).encode())

    async def _ask_all(self, target: str) -> list[bytes]:
        """The bodies of those others that answer well."""
        answers = await asyncio.gather(
            *(self._ask(number, "GET", target, [(_SECRET, self._secret)]) for number in self._ports),
            return_exceptions=True,
        )
        return [one[2] for one in answers if not isinstance(one, BaseException) and one[0] == 200]

    async def _ask(
        self, number: int, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes | None = None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Raises `Unavailable`."""
        port = self._ports.get(number)
        if port is None:
            raise Unavailable("the router's first worker is being started; try again")
        deadlines = Deadlines(connect_s=_TIMEOUT_S, first_byte_s=_TIMEOUT_S, between_s=_TIMEOUT_S)
        try:
            async with HttpClient() as client:
                answer = await client.open(
                    Origin("127.0.0.1", port), method, target, headers, body or None, deadlines=deadlines
                )
                try:
                    return answer.status, answer.headers, await answer.read(_LONGEST)
                finally:
                    answer.close()
        except TransferError as error:
            raise Unavailable("a worker of the router does not answer; try again") from error


_NOTHING = Counts()


def _key(instance: Instance) -> str:
    return f"{instance.name} {instance.url}"


def _identity(one: Instance | WorkerMember) -> tuple[str, LegRole, str, int]:
    """Names alone do not say it: a process that starts later gives them anew."""
    return one.name, one.role, one.url, one.bootstrap_port


def _as_member(one: Instance) -> WorkerMember:
    return WorkerMember(
        one.name, one.role, one.url, one.bootstrap_port, one.draining, one.drained, one.leaves_by_itself
    )


def _told(text: bytes) -> list[dict[str, dict[str, float]]]:
    return list(json.loads(text)["decisions"])
