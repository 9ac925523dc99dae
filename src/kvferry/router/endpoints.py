"""What clients may ask of the instances: a completion over two of them, or anything else on one.

Only what was read whole and strictly goes on, to a path that is known to be for clients.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.core.errors import InvalidRequest, PeerLost, RequestError
from kvferry.http.errors import Unreachable
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.response import Response
from kvferry.router.body import RequestBody
from kvferry.router.candidates import Candidates
from kvferry.router.errors import UnsupportedBody
from kvferry.router.exchange import ClientRequest, Exchange, Services, failure, unanswered
from kvferry.router.headers import JSON, REQUEST_ID, SERVER_TIMING, TIMING_WANTED, content_type, for_instance
from kvferry.router.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS, PublicPath, PublicPaths
from kvferry.router.plan import Plan, make_plan
from kvferry.router.relay import Relay
from kvferry.router.upstream import Answer

_READS = frozenset({"GET", "HEAD"})


class Endpoints:
    """Serves clients' requests, once they have been read."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._paths = PublicPaths(services.config.forward_path)
        self._relay = Relay(services.pools, services.clock)

    def admit(self, method: str, path: str, query: str) -> PublicPath:
        """Whether that is for clients at all, before a body is read. Raises `RequestError`."""
        if query and any(not 32 < ord(character) < 127 for character in query):
            raise InvalidRequest("the query of the URL must be percent-encoded ASCII")
        return self._paths.find(method, path)

    async def handle(self, request: ClientRequest, body: RequestBody | bytes | None, response: Response) -> None:
        """Answer what has been read. Raises `RequestError` before anything was answered."""
        if request.path in PROMPT_FIELDS and isinstance(body, RequestBody):
            await self._complete(request, body, response)
        else:
            await self._forward(request, body, response)

    def read(self, request: ClientRequest, public: PublicPath) -> RequestBody | bytes | None:
        """The body, checked: JSON, whatever the client calls it; `public` as `admit` found it. Raises `InvalidRequest`
        and `UnsupportedBody`."""
        if request.method in _READS and not request.body:
            return None
        encoding = find_header(request.headers, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise UnsupportedBody("request bodies must not be compressed; leave Content-Encoding out")
        if public.takes_forms and content_type(request.headers) == b"multipart/form-data":
            return request.body
        return RequestBody.parse(request.body, trust_tickets=self._services.config.trust_client_tickets)

    async def _complete(self, request: ClientRequest, body: RequestBody, response: Response) -> None:
        """POST /v1/completions and /v1/chat/completions: plan the legs, call them, relay the answer."""
        candidates, plan = self._choose(request, body)
        delivered = False
        exchange = Exchange(self._services, request, body, candidates)
        try:
            answer = await exchange.serve(plan)
            candidates.answered(answer.instance)
            if find_header(request.headers, TIMING_WANTED) is not None:
                response.add_header(SERVER_TIMING, candidates.decision.timings.server_timing())
            delivered = await self._relay.send(answer, response, exchange) and answer.status < 400
            if delivered:
                await exchange.delivered()
        except RequestError as error:
            response.fail(error)
        finally:
            candidates.close(response.num_bytes if delivered else 0)
            await exchange.close()

    def _choose(self, request: ClientRequest, body: RequestBody) -> tuple[Candidates, Plan]:
        services = self._services
        asked = services.chooser.read(request.path, body, request.headers)
        decision = services.chooser.record(request.path, asked, request.request_id, request.arrived)
        span = services.chooser.tracer.request(
            f"POST {request.path}", request.headers, request.arrived, {"kvferry.request_id": decision.request_id}
        )
        retries = services.config.retries
        candidates = Candidates(services.chooser, services.pools, services.metrics, retries, asked, decision, span)
        return candidates, candidates.plan(make_plan(request.path, body, services.pools))

    async def _forward(self, request: ClientRequest, body: RequestBody | bytes | None, response: Response) -> None:
        """One instance answers, as it is asked."""
        own: RawHeaders = [(REQUEST_ID, request.request_id)]
        if isinstance(body, RequestBody):
            body, own = body.encode(), [*own, JSON]
        answer = await self._ask_around(request, body, own)
        try:
            await self._relay.send(answer, response)
        finally:
            answer.close()

    async def _ask_around(self, request: ClientRequest, body: bytes | None, own: RawHeaders) -> Answer:
        """The first answer there is. A request that may have been begun is repeated only if it changes nothing, or
        the instance stands still."""
        headers = for_instance(request.headers, own)
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
        """Decode instances; for what only asks, prefill instances too when none of those answers."""
        pools = self._services.pools
        tried: set[Instance] = set()
        for pool in (pools.decode, pools.prefill) if request.method in _READS else (pools.decode,):
            while (instance := pool.pick(tried)) is not None:
                tried.add(instance)
                yield instance
