"""The requests of clients that instances answer: a completion on two of them, or any other request on one.

A request is forwarded only after it was read completely and strictly, and only to a path that is known to be for
clients.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.api.decoding import require_json
from kvferry.core.errors import InvalidRequest, PeerLost, RequestError
from kvferry.http.errors import Unreachable
from kvferry.http.headers import RawHeaders, header_lines
from kvferry.http.response import Response
from kvferry.observe.tracing import Span
from kvferry.router.body import RequestBody
from kvferry.router.candidates import Candidates
from kvferry.router.client_request import ClientRequest
from kvferry.router.errors import failure, unanswered
from kvferry.router.exchange import Exchange, Services
from kvferry.router.headers import JSON, REQUEST_ID, SERVER_TIMING, TIMING_WANTED, content_type, for_instance
from kvferry.router.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS, PublicPath, PublicPaths
from kvferry.router.plan import Plan, make_plan
from kvferry.router.relay import Relay
from kvferry.router.upstream import UpstreamAnswer

_READS = frozenset({"GET", "HEAD"})


class Endpoints:
    """Serves clients' requests, once they have been read."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._paths = PublicPaths(services.config.forward_path)
        self._relay = Relay(services.pools, services.clock)

    def admit(self, method: str, path: str, query: str) -> PublicPath:
        """The public path that a request is for, before its body is read. Raises `RequestError`."""
        if query and any(not 32 < ord(character) < 127 for character in query):
            raise InvalidRequest("the query of the URL must be percent-encoded ASCII")
        return self._paths.find(method, path)

    async def handle(self, request: ClientRequest, body: RequestBody | bytes | None, response: Response) -> None:
        """Answer a request that has been read. Raises `RequestError` before anything was answered."""
        if request.path in PROMPT_FIELDS and isinstance(body, RequestBody):
            await self._complete(request, body, response)
        else:
            await self._forward(request, body, response)

    def read(self, request: ClientRequest, public: PublicPath) -> RequestBody | bytes | None:
        """The checked body, which must be JSON and say so; `public` is what `admit` returned.
        Raises `InvalidRequest`."""
        if request.method in _READS and not request.body:
            return None
        if public.takes_forms and content_type(request.headers) == b"multipart/form-data":
            return request.body
        if request.first.get(b"content-type") != JSON[1] or b"content-encoding" in request.first:
            require_json(_text(request, b"content-type"), _text(request, b"content-encoding"))
        return RequestBody.parse(request.body, trust_tickets=self._services.config.trust_client_tickets)

    async def _complete(self, request: ClientRequest, body: RequestBody, response: Response) -> None:
        """POST /v1/completions and /v1/chat/completions: plan the legs, call them, relay the answer."""
        candidates, plan = self._choose(request, body)
        delivered = False
        exchange = Exchange(self._services, request, body, candidates)
        try:
            answer = await exchange.serve(plan)
            candidates.answered(answer.instance)
            if TIMING_WANTED in request.first:
                response.add_header(SERVER_TIMING, candidates.decision.server_timing())
            delivered = await self._relay.send(answer, response, exchange) and answer.status < 400
            if delivered:
                await exchange.delivered()
        except RequestError as error:
            response.fail(error)
        finally:
            candidates.close(response.num_bytes if delivered else 0)
            await exchange.close()

    def _choose(self, request: ClientRequest, body: RequestBody) -> tuple[Candidates, Plan]:
        services, chooser, path = self._services, self._services.chooser, request.path
        asked = chooser.read(path, body, request.first)
        decision = chooser.record(path, asked, request.request_id, request.arrived)
        span: Span | None = None
        if chooser.tracer is not None:
            about = {"kvferry.request_id": request.request_id.decode(errors="replace")}
            span = chooser.tracer.request(f"POST {path}", request.headers, request.arrived, about)
        retries = services.config.retries
        candidates = Candidates(chooser, services.pools, services.metrics, retries, asked, decision, span)
        return candidates, candidates.plan(make_plan(path, body, services.pools))

    async def _forward(self, request: ClientRequest, body: RequestBody | bytes | None, response: Response) -> None:
        """One instance answers the request as it is."""
        own: RawHeaders = [(REQUEST_ID, request.request_id)]
        if isinstance(body, RequestBody):
            body, own = body.encode(), [*own, JSON]
        answer = await self._ask_around(request, body, own)
        try:
            await self._relay.send(answer, response)
        finally:
            answer.close()

    async def _ask_around(self, request: ClientRequest, body: bytes | None, own: RawHeaders) -> UpstreamAnswer:
        """The first answer of an instance. A request that may have been started is repeated only if it changes nothing,
        or if the instance hangs."""
        headers = header_lines(for_instance(request.headers, own + self._services.upstream.authorization))
        lost: PeerLost | None = None
        for instance in self._candidates(request):
            wait = self._services.upstream.wait_for(instance, body)
            try:
                return await self._services.upstream.open(instance, request.method, request.target, headers, body, wait)
            except PeerLost as error:
                lost = error
                self._services.metrics.leg_failed(instance, failure(error))
                if not isinstance(error, Unreachable) and request.method not in _READS:
                    break
        raise unanswered(lost)

    def _candidates(self, request: ClientRequest) -> Iterator[Instance]:
        """Decode instances; for requests that only read, also prefill instances if no decode instance answers."""
        pools = self._services.pools
        tried: set[Instance] = set()
        for pool in (pools.decode, pools.prefill) if request.method in _READS else (pools.decode,):
            while (instance := pool.pick(tried)) is not None:
                tried.add(instance)
                yield instance


def _text(request: ClientRequest, header: bytes) -> str | None:
    value = request.first.get(header)
    return None if value is None else value.decode("latin-1")
