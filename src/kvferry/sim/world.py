"""A simulated deployment: a router, instances behind it, and clients that send it requests.

Owns the simulation and the result of each request. `hunts` injects faults into it and checks invariants.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import sub
from typing import Any

import msgspec

from kvferry.api.answers import Completion
from kvferry.core.errors import TransferError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.router.config import RouterConfig
from kvferry.router.instances.membership import InstanceDeclaration
from kvferry.sim.engine import MODEL, Role, SimInstance, SimInstanceSpec
from kvferry.sim.kv import counted_token, expected_tokens
from kvferry.sim.loop import Simulation
from kvferry.sim.machine import SimCore
from kvferry.sim.network import Network, NetworkSpec, SimHost
from kvferry.sim.router import SimRouter
from kvferry.sim.storage import Storage
from kvferry.sim.times import StoreTimes

TOKEN = "a secret of the simulated deployment"
PORT = 8000
_JSON = [(b"content-type", b"application/json")]
_COLLECT_EVERY = 200_000
"""Callbacks between two garbage collections, so that each run has them at the same points."""


@dataclass(frozen=True, slots=True)
class DirectHandOff:
    """A request that its client hands off without a router, as a proxy does. `prefill`, `decode`: numbers in [0, 1),
    each of which chooses an instance of the role. `reuse_after_s`: seconds after the request to D at which the
    client has P release the transfer id, and uses it again for another prompt."""

    prefill: float
    decode: float
    reuse_after_s: float


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of a trace. `cancel_after_s`: seconds after which the client cancels it; None: never. `direct`: it
    does not use a router."""

    at_s: float
    prompt: Sequence[int]
    max_tokens: int
    seed: int
    cancel_after_s: float | None = None
    direct: DirectHandOff | None = None


@dataclass(frozen=True)
class WorldSpec:
    """A simulated deployment. `instance`: the instances of all roles but those in `by_role`; all have the same model.
    `request_timeout_s`: seconds after which a request counts as lost. `logs_events`: events are logged, at least as a
    digest, so that two runs can be compared."""

    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    num_routers: int = 1
    num_units: int = 0
    """Number of units, to which the instances of each role are assigned round-robin; hand-offs stay within one. 0: no
    units."""
    instance: SimInstanceSpec = field(default_factory=SimInstanceSpec)
    by_role: Mapping[Role, SimInstanceSpec] = field(default_factory=dict)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    store: StoreTimes = field(default_factory=StoreTimes)
    router: dict[str, Any] = field(default_factory=dict)
    num_cores: int = 0
    """Number of cores of the machine of all instances; if there are fewer cores, instances share them. 0: each has its
    own."""
    request_timeout_s: float = 900.0
    logs_events: bool = True

    def instance_of(self, role: Role) -> SimInstanceSpec:
        """The specification of instances of this role."""
        return self.by_role.get(role, self.instance)


@dataclass(slots=True)
class RequestResult:
    """The result of a request. `ttft_s`, `e2e_s`: seconds from its arrival to its first token and to its end; None: it
    had none. `num_ends`: number of times that it ended, which must be 1."""

    number: int
    spec: RequestSpec
    outcome: str = ""
    """`complete`, `left` (cancelled by the client), `refused` (a status that is not 200), `broken` (an error in the
    stream, or a connection that ended)."""
    status: int = 0
    reason: str = ""
    num_tokens: int = 0
    has_expected_tokens: bool = True
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_ends: int = 0
    lost_router: bool = False
    """The router's process ended while the request ran, or there was none, so that the result has no reason."""
    sent_on_closed_connection: bool = False
    """It was sent on an idle connection that a router had closed at its shutdown: clients retry it."""


class World:
    """One deployment in one simulation. Use it in `with world.running():`."""

    max_shutdown_s = 90.0
    """Maximum seconds of a shutdown."""

    def __init__(self, spec: WorldSpec, seed: int, *, keep_log: bool = False) -> None:
        """`keep_log`: keep the text of logged events, not only their digest."""
        self.spec = spec
        self.simulation = Simulation(seed, keep_log=keep_log, logs_events=spec.logs_events)
        self.network = Network(self.simulation, spec.network)
        self.storage = Storage(self.simulation, spec.store)
        self.instances: list[SimInstance] = []
        self.routers: list[SimRouter] = []
        self.results: list[RequestResult] = []
        self.itl_s = array("f")
        """Seconds between two tokens of an answer."""
        self.logged_errors: list[str] = []
        """Errors that kvferry's code logged."""
        self._upcoming: Iterator[RequestSpec] = iter(())
        self._next: RequestSpec | None = None
        self._num_unfinished = 0
        self._client: HttpClient | None = None
        self._stop_clients: asyncio.Event | None = None

    # Lifecycle.

    @contextmanager
    def running(self) -> Iterator[World]:
        """Start everything. On exit, processes that still run are dropped without a shutdown (`end`)."""
        handler = _Errors(self)
        logger = logging.getLogger("kvferry")
        level = logger.level
        logger.setLevel(logging.ERROR)  # unlike an assignment, it clears the caches of child loggers
        logger.addHandler(handler)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with self.simulation.running():
                self._start()
                yield self
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            if was_enabled:
                gc.enable()

    def _start(self) -> None:
        counts: dict[Role, int] = {
            "prefill": self.spec.num_prefill,
            "decode": self.spec.num_decode,
            "both": self.spec.num_both,
        }
        for role, number in counts.items():
            for index in range(number):
                self._add_instance(f"{role}{index}", role)
        cores = [SimCore(self.network.loop) for _ in range(self.spec.num_cores)]
        self.network.cores = cores
        for index, instance in enumerate(self.instances if cores else ()):
            instance.host.cores = [cores[index % len(cores)]]
        for index in range(self.spec.num_routers):
            self._add_router(f"router{index}" if index else "router")
            self.routers[-1].host.cores = cores
        clients = self.network.host("clients")
        clients.cores = cores
        loop = clients.process("clients").thread("clients")
        loop.call_soon(lambda: loop.create_task(self._run_clients()))
        self.clients = loop
        self.run_until(lambda: self._client is not None and self._is_ready(), 60.0)
        if self.spec.num_units:
            self._declare_units()

    def _declare_units(self) -> None:
        """Declare all instances to the routers, as the controller of a fleet does."""
        declared: list[InstanceDeclaration] = []
        num_of_role = Counter[Role]()
        for instance in self.instances:
            unit = str(num_of_role[instance.role] % self.spec.num_units)
            declared.append(
                InstanceDeclaration(
                    instance.name, "prefill" if instance.role == "prefill" else "decode", instance.url, unit=unit
                )
            )
            num_of_role[instance.role] += 1
        for router in self.routers:
            router.apply_change("declares", lambda membership: membership.declare(declared))
        self.run_until(lambda: all(router.num_usable == len(declared) for router in self.routers), 60.0)

    def _add_instance(self, name: str, role: Role) -> None:
        process = self.network.host(name).process(name)
        instance = SimInstance(name, role, self.spec.instance_of(role), process, PORT, TOKEN, self.storage)
        self.instances.append(instance)
        instance.start()

    def _add_router(self, name: str) -> None:
        prefill = tuple(instance.url for instance in self.instances if instance.role == "prefill")
        decode = tuple(instance.url for instance in self.instances if instance.role != "prefill")
        config = RouterConfig(prefill_url=prefill, decode_url=decode, **self.spec.router)
        if self.spec.num_units:
            config = RouterConfig(declared=True, **self.spec.router)
        self.routers.append(
            SimRouter(self.network.host(name), PORT, config, TOKEN, start_delay_s=1.0)
        )  # instances are up

    def _is_ready(self) -> bool:
        return all(part.router is not None for part in self.routers) and all(
            part.engine is not None for part in self.instances
        )

    # Time.

    def run_until(self, done: Any, timeout_s: float) -> bool:
        """Let time pass until `done`, at most `timeout_s`. Returns True if it is done. Raises `Deadlock`."""
        until = self.simulation.now + timeout_s
        while not done() and self.simulation.now < until:
            if self.simulation.run_until(done, until=until, max_callbacks=_COLLECT_EVERY):
                gc.collect()
        return bool(done())

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(lambda: False, seconds)

    # Requests.

    def submit(self, requests: Iterable[RequestSpec]) -> None:
        """Have the clients send these requests at their times. `requests` must be sorted by time, and are read one by
        one."""
        self._upcoming = chain(self._upcoming, requests)
        if self._next is None:
            self._await_next()

    def _await_next(self) -> None:
        self._next = next(self._upcoming, None)
        if self._next is not None:
            self.clients.call_at(self._next.at_s, self._begin, self._next)

    def _begin(self, spec: RequestSpec) -> None:
        result = RequestResult(len(self.results), spec)
        self.results.append(result)
        self._num_unfinished += 1
        self.clients.create_task(self._request(result))
        self._await_next()

    @property
    def is_done(self) -> bool:
        """True if all requests have ended."""
        return self._num_unfinished == 0 and self._next is None

    @property
    def num_ended(self) -> int:
        """Number of ended requests."""
        return len(self.results) - self._num_unfinished

    def run_all_requests(self) -> bool:
        """Let time pass until all requests have ended. False: some have not ended `request_timeout_s` after the last
        one was sent."""
        while self._next is not None:
            self.run_until(lambda: self._next is None, max(0.0, self._next.at_s - self.simulation.now) + 1.0)
        return self.run_until(lambda: self.is_done, self.spec.request_timeout_s)

    async def _run_clients(self) -> None:
        self._stop_clients = asyncio.Event()
        async with HttpClient(client_name="a client") as self._client:
            await self._stop_clients.wait()

    async def _request(self, result: RequestResult) -> None:
        spec, begun = result.spec, self.simulation.now
        routers = self.open_routers()
        router = routers[result.number % len(routers)]
        incarnation, was_up = router.incarnation, router.router is not None
        try:
            async with asyncio.timeout(spec.cancel_after_s):
                if spec.direct is None:
                    await self._ask(result, begun, router)
                else:
                    await self._hand_off(result, begun, spec.direct)
        except TimeoutError:
            result.outcome = "left"
        except TransferError as error:
            result.outcome, result.reason = "broken", repr(error)
        result.sent_on_closed_connection = router.is_shutting_down and not result.status
        result.lost_router = not was_up or result.sent_on_closed_connection or router.incarnation != incarnation
        result.e2e_s = self.simulation.now - begun
        result.num_ends += 1
        self._num_unfinished -= 1
        self.simulation.note(f"request {result.number} {result.outcome} {result.status} {result.num_tokens}")

    def hosts(self) -> list[SimHost]:
        """The hosts of routers and instances, but not the clients'."""
        return [*(part.host for part in self.routers), *(part.host for part in self.instances)]

    def open_routers(self) -> list[SimRouter]:
        """The routers that clients use; at least one."""
        return self.routers

    async def _ask(self, result: RequestResult, begun: float, router: SimRouter) -> None:
        await self._stream(result, begun, router.host, _body(result.spec))

    async def _hand_off(self, result: RequestResult, begun: float, direct: DirectHandOff) -> None:
        """Send the request to P and then to D. While D answers, have P reuse the transfer id."""
        prefill = _choose(self.instances, direct.prefill, "prefill")
        decode = _choose(self.instances, direct.decode, "decode")
        transfer_id, spec = f"direct-{result.number}", result.spec
        ticket = await self._prefill(prefill, spec, transfer_id)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reuse_transfer_id(prefill, spec, transfer_id, direct.reuse_after_s))
            await self._stream(result, begun, decode.host, _body(spec, kv_transfer_params=ticket))

    async def _prefill(self, instance: SimInstance, spec: RequestSpec, transfer_id: str) -> Any:
        """The ticket in P's answer; None: there is none."""
        assert self._client is not None
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        body = _body(spec, max_tokens=1, stream=False, kv_transfer_params=params)
        origin = Origin(instance.host.address, PORT)
        call = self._client.start(origin, "POST", "/v1/completions", _JSON, msgspec.json.encode(body))
        try:
            await call.begun()
            answer = msgspec.json.decode(await call.read(2**20))
            return answer.get("kv_transfer_params")
        finally:
            call.close()

    async def _reuse_transfer_id(
        self, instance: SimInstance, spec: RequestSpec, transfer_id: str, delay_s: float
    ) -> None:
        """Reuse the transfer id for a prompt of the same length with other tokens, which may get the same blocks."""
        await asyncio.sleep(delay_s)
        instance.release(transfer_id)
        other = [(token + 1) % self.spec.instance.vocab_size for token in spec.prompt]
        with suppress(TransferError):
            await self._prefill(instance, replace(spec, prompt=other), transfer_id)

    async def _stream(self, result: RequestResult, begun: float, host: SimHost, body: dict[str, Any]) -> None:
        """Send a request, and record its result."""
        assert self._client is not None
        name = f"request-{result.number}"
        times = self.simulation.token_times[f"cmpl-{name}"] = deque()
        reader = _Reader(self, result, begun, times)
        headers = [*_JSON, (b"x-request-id", name.encode())]
        call = self._client.start(
            Origin(host.address, PORT),
            "POST",
            "/v1/completions",
            headers,
            msgspec.json.encode(body),
            connect_s=30.0,
        )
        try:
            await call.begun()
            result.status = call.status
            if call.status != 200:
                result.outcome, result.reason = "refused", (await call.read(2**20)).decode(errors="replace")
                return
            async for chunk in call.chunks():
                reader.feed(chunk)
            result.outcome = "complete" if reader.is_done else "broken"
        finally:
            call.close()
            del self.simulation.token_times[f"cmpl-{name}"]
            reader.check_tokens()

    def shut_down(self) -> bool:
        """Shut everything down as signals do. Returns True if all processes have ended."""
        if self._stop_clients is not None:
            self.clients.call_soon(self._stop_clients.set)
        self.run_until(lambda: not self.clients.process.tasks(), 1.0)
        for router in self.routers:
            router.stop()
        for instance in self.instances:
            if instance.process.is_alive:
                self.clients.call_soon(instance.stop)
        living = [instance.process for instance in self.instances if instance.process.is_alive]
        self.run_until(
            lambda: not (self.network.num_open or any(process.tasks() for process in living)), self.max_shutdown_s
        )
        return not any(process.tasks() for process in living)


def _body(spec: RequestSpec, **fields: Any) -> dict[str, Any]:
    """The body of a request; `fields` replace others, or are appended."""
    body = {
        "model": MODEL,
        "prompt": list(spec.prompt),
        "max_tokens": spec.max_tokens,
        "seed": spec.seed,
        "stream": True,
        "return_token_ids": True,
    }
    return body | fields


def _choose(instances: Sequence[SimInstance], share: float, role: Role) -> SimInstance:
    eligible = [instance for instance in instances if instance.role in (role, "both")]
    return eligible[int(share * len(eligible))]


class _Errors(logging.Handler):
    """Collects logged errors."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.logged_errors.append(self.format(record))


class _Reader:
    """Reads the events of one answer. Its tokens are compared with the expected ones at the end, all at once."""

    def __init__(
        self, world: World, result: RequestResult, begun: float, times: deque[tuple[float, list[float]]]
    ) -> None:
        """`times`: see `Simulation.token_times`."""
        self._world, self._result, self._begun, self._times = world, result, begun, times
        self._rest = b""
        self._tokens: list[int] = []
        self._last = 0.0
        self.is_done = False

    def feed(self, chunk: bytes) -> None:
        """Read more of the stream."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):  # a comment, for keep-alive
                self._take(event.removeprefix(b"data: "))

    def _take(self, event: bytes) -> None:
        result, now = self._result, self._world.simulation.now
        if event == b"[DONE]":
            self.is_done = not result.reason and result.num_tokens == result.spec.max_tokens
            if not (self.is_done or result.reason):
                result.reason = f"{result.num_tokens} tokens instead of {result.spec.max_tokens}"
            return
        if b'"error"' in event[:12]:
            result.reason = event.decode(errors="replace")
            return
        tokens = [token for choice in _DECODER.decode(event).choices for token in choice.token_ids or ()]
        if not tokens:
            return
        arrivals = [now] * len(tokens)
        if len(tokens) > 1 and self._times and len(self._times[0][1]) == len(tokens):
            left, computed = self._times.popleft()  # each would have arrived earlier by the time since it was computed
            arrivals = [max(self._last, now - (left - computed_at)) for computed_at in computed]
        if result.ttft_s is None:
            result.ttft_s = arrivals[0] - self._begun
        else:
            self._world.itl_s.append(arrivals[0] - self._last)
        self._world.itl_s.extend(map(sub, arrivals[1:], arrivals))
        self._last = arrivals[-1]
        self._tokens += tokens
        result.num_tokens += len(tokens)

    def check_tokens(self) -> None:
        """Compare the tokens with the expected ones."""
        spec, instance = self._result.spec, self._world.spec.instance
        number = len(self._tokens)
        if instance.has_contents:
            expected = expected_tokens(spec.prompt, spec.seed, number, instance.vocab_size, instance.num_layers)
        else:
            positions = range(len(spec.prompt), len(spec.prompt) + number)
            expected = [counted_token(spec.seed, position, instance.vocab_size) for position in positions]
        self._result.has_expected_tokens = self._tokens == expected and number <= spec.max_tokens


_DECODER = msgspec.json.Decoder(Completion)
