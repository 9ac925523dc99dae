"""Clients' requests that instances answer: a completion on two instances, or any other request on one.

A request is forwarded only after it was read completely and strictly, and only to a public path.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from kvferry.api.decoding import require_json
from kvferry.api.dialects.translator import Translator
from kvferry.core.errors import InvalidRequest, PeerLost
from kvferry.core.messages.openai import sane_request_id
from kvferry.http.headers import RawHeaders, header_lines
from kvferry.http.server.response import Response
from kvferry.router.body import RequestBody
from kvferry.router.client_request import ClientRequest
from kvferry.router.errors import failure, unanswered
from kvferry.router.headers import JSON, NOT_COMPRESSED, REQUEST_ID, content_type, for_instance
from kvferry.router.instances.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS, PublicPath, PublicPaths
from kvferry.router.request.exchange import Exchange
from kvferry.router.request.leg import LegChanges
from kvferry.router.request.services import Services

_READS = frozenset({"GET", "HEAD"})


class Endpoints:
    """Serves clients' requests, once they have been read."""

    def __init__(self, services: Services, translator: Translator) -> None:
        self._services, self._translator = services, translator
        self._session_header = services.config.session_header.lower().encode()
        self._paths = PublicPaths(services.config.forward_path)

    def admit(self, method: str, path: str, query: str) -> PublicPath:
        """Find the public path of a request, before its body is read. Raises `RequestError`."""
        if query and any(not 32 < ord(character) < 127 for character in query):
            raise InvalidRequest("the query of the URL must be percent-encoded ASCII")
        return self._paths.find(method, path)

    def handle(
        self, request: ClientRequest, body: RequestBody | bytes | None, response: Response
    ) -> Coroutine[Any, Any, None]:
        """Answer a request that has been read. Raises `RequestError` before anything was answered."""
        if request.path in PROMPT_FIELDS and isinstance(body, RequestBody):
            return Exchange(self._services, request, body, response).run()
        return self._forward(request, body, response)

    def read(self, request: ClientRequest, public: PublicPath) -> RequestBody | bytes | None:
        """Check and parse the body, which must be JSON with its content type. A form is returned undecoded if the path
        takes forms; None: a request that reads and has no body. `public`: from `admit`. Raises `InvalidRequest`."""
        if request.method in _READS and not request.body:
            return None
        if public.takes_forms and content_type(request.headers) == b"multipart/form-data":
            return request.body
        if request.first.get(b"content-type") != JSON[1] or b"content-encoding" in request.first:
            require_json(_text(request, b"content-type"), _text(request, b"content-encoding"))
        return self._parse(request.body)

    def _parse(self, raw: bytes) -> RequestBody:
        config = self._services.config
        return RequestBody.parse(raw, trust_tickets=config.trust_client_tickets, takes_keys=config.client_kv_keys)

    async def translate(
        self, request: ClientRequest, body: RequestBody, response: Response, owner: bytes
    ) -> tuple[ClientRequest, RequestBody]:
        """Translate a request to one of `TRANSLATED_PATHS` into a request to an instance's API, and have its answer
        translated back. `owner`: as in `Translator.translate`. Raises `RequestError`."""
        request_id = request.request_id.decode()
        translated = await self._translator.translate(request.path, body.encode(), request_id, owner)
        response.translate(translated.translation)
        first = request.first
        if translated.session and self._session_header not in first:
            first = {**first, self._session_header: translated.session.encode("latin-1", "backslashreplace")}
        request = msgspec.structs.replace(
            request,
            target=translated.path,
            path=translated.path,
            headers=for_instance(request.headers, [NOT_COMPRESSED]),
            first=first,
            body=translated.body,
        )
        return request, self._parse(translated.body)

    def named(self, request: ClientRequest, body: RequestBody | bytes | None) -> ClientRequest:
        """The request with the `request_id` of its body as its id, unless a header has an id. vLLM does the same."""
        if REQUEST_ID in request.first or not isinstance(body, RequestBody):
            return request
        value = body.get("request_id")
        if not isinstance(value, str):
            return request
        return msgspec.structs.replace(request, request_id=sane_request_id(value).encode())

    async def _forward(self, request: ClientRequest, body: RequestBody | bytes | None, response: Response) -> None:
        """Forward the request to one instance as it is. If the instance is lost after it may have begun, only requests
        that read are sent to another one."""
        services, changes = self._services, LegChanges()
        added_headers: RawHeaders = [(REQUEST_ID, request.request_id)]
        if isinstance(body, RequestBody):
            body, added_headers = body.encode(), [*added_headers, JSON]
        headers = header_lines(for_instance(request.headers, added_headers + services.connections.authorization))
        lost: PeerLost | None = None
        for instance in self._candidates(request):
            leg = services.legs.send(instance, request.method, request.target, headers, body, changes)
            try:
                while leg.state == "sent":
                    await changes.wait()
                if leg.state != "lost" or leg.first_byte_at:
                    await services.relay.send(leg, response)
                    return
            finally:
                leg.close()
            lost = leg.error
            assert lost is not None
            services.metrics.leg_failed(instance, failure(lost))
            if not leg.was_unreachable and request.method not in _READS:
                break
        raise unanswered(lost)

    def _candidates(self, request: ClientRequest) -> Iterator[Instance]:
        """Yield decode instances; for requests that only read, then prefill instances."""
        pools = self._services.pools
        tried: set[Instance] = set()
        for pool in (pools.decode, pools.prefill) if request.method in _READS else (pools.decode,):
            while (instance := pool.pick(tried)) is not None:
                tried.add(instance)
                yield instance


def _text(request: ClientRequest, header: bytes) -> str | None:
    value = request.first.get(header)
    return None if value is None else value.decode("latin-1")
