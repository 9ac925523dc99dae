"""One request of a gateway, told from its headers to the end of its answer: a stream of Envoy's external processing.

The body comes in pieces (FULL_DUPLEX_STREAMED) and is read as a whole, since the prompt decides where it goes. Then the
gateway is told where, and gets the body back. It says when the answer begins, and ends the stream when it is over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import msgspec

from kvferry.core.errors import InvalidRequest, RequestError
from kvferry.core.messages.openai import BodyTooLarge, internal_error, sane_request_id
from kvferry.http.errors import RequestTimeout
from kvferry.http.headers import RawHeaders, first_values
from kvferry.http.server.limits import HttpLimits
from kvferry.router.app import CLIENT_GONE, Router
from kvferry.router.body import RequestBody
from kvferry.router.client_request import ClientRequest
from kvferry.router.edge.admission import Slot
from kvferry.router.edge.tenants import Tenant
from kvferry.router.headers import OWN_PREFIX, REQUEST_ID
from kvferry.router.picker import messages
from kvferry.router.picker.config import PickerConfig
from kvferry.router.picker.pick import Picked, Picker, endpoint_of
from kvferry.router.request.leg import MAX_BUSY_S

logger = logging.getLogger(__name__)

_ROUTING = (b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port", b"x-data-parallel-rank")
"""What tells an instance, or a sidecar of llm-d's, where to send something: not a client's to say."""

_PROVED = "x509_pem_cert"
"""What gRPC knows of a gateway that has shown a certificate of an authority that is trusted."""


class ProcessedRequest:
    """One stream. Owns what the request takes of the router's limits and of its instances until it is over."""

    def __init__(self, router: Router, config: PickerConfig, limits: HttpLimits, stream: Any) -> None:
        self._router, self._config, self._limits, self._stream = router, config, limits, stream
        longest_pause_s = MAX_BUSY_S if _PROVED in stream.auth_context() else config.unproven_pause_s
        self._picker = Picker(router.services, config.fallbacks, longest_pause_s)
        self._path, self._status = "", 0
        self._id = sane_request_id(None)
        self._slot: Slot | None = None
        self._tenant: Tenant | None = None
        self._picked: Picked | None = None
        self._mode = messages.FULL_DUPLEX

    async def run(self) -> None:
        """Answer all messages of the stream; returns when the gateway ends it."""
        clock, metrics = self._router.services.clock, self._router.services.metrics
        begun = clock.monotonic()
        try:
            await self._choose()
            await self._follow()
        except RequestError as error:
            await self._refuse(error)
        except Exception:
            # The edge: a fault in one request is that request's answer, and no other's concern.
            logger.exception("request %s failed", self._id)
            await self._refuse(internal_error(self._id))
        finally:
            self._close()
            metrics.request_done(self._path, self._status or CLIENT_GONE, clock.monotonic() - begun)

    async def _refuse(self, error: RequestError) -> None:
        self._status = error.status
        await self._stream.write(messages.refusal(error, self._path, self._id))

    async def _choose(self) -> None:
        """Tell the gateway where the request goes, and give it the body. Raises `RequestError`: the client's answer."""
        router, stream = self._router, self._stream
        message = await self._read(self._limits.http_header_s)
        if message is grpc.aio.EOF or message.WhichOneof("request") != "request_headers":
            raise InvalidRequest("the gateway must send a request's headers first (request_header_mode: SEND)")
        self._note_modes(message)
        request = _read_head(message, router.services.clock.wall())
        self._path, self._id = request.path, request.request_id.decode()
        public = router.endpoints.admit(request.method, request.path, request.target.partition("?")[2])
        client = _client_of(request)
        self._slot = Slot(router.admission, client)
        has_body, has_trailers = not message.request_headers.end_of_stream, False
        if has_body:
            body, has_trailers = await self._read_body(self._slot)
            request = msgspec.structs.replace(request, body=body)
        parsed = router.endpoints.read(request, public)
        request = router.endpoints.named(request, parsed)
        self._id = request.request_id.decode()
        tenant = router.tenants.find(client.encode(), request.headers, parsed)
        await router.take_turn(tenant, request.path, parsed)
        self._tenant = tenant
        self._picked = picked = self._picker.pick(request, parsed, messages.subset_of(message))
        sent = parsed.encode() if isinstance(parsed, RequestBody) else request.body
        headers, without = self._headers(picked, request, None if sent is request.body else len(sent))
        await stream.write(messages.destination(picked.endpoints, headers, without))
        if has_body:
            for one in messages.request_body(sent, ends=not has_trailers):
                await stream.write(one)
        if has_trailers:
            await stream.write(messages.request_trailers())

    def _note_modes(self, message: messages.Message) -> None:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.response_body_mode
            if (
                message.protocol_config.request_body_mode != messages.FULL_DUPLEX
                and not message.request_headers.end_of_stream
            ):
                raise RequestError("the gateway must send bodies with request_body_mode: FULL_DUPLEX_STREAMED")

    def _headers(self, picked: Picked, request: ClientRequest, num_bytes: int | None) -> tuple[RawHeaders, list[str]]:
        """The headers to set, and the names of those to remove. `num_bytes` of the body, if it is another one."""
        services = self._router.services
        headers: RawHeaders = [*services.connections.authorization, (REQUEST_ID, self._id.encode())]
        if picked.prefill is not None:
            headers.append((self._config.prefill_header.lower().encode(), endpoint_of(picked.prefill).encode()))
        if num_bytes is not None:
            headers.append((b"content-length", str(num_bytes).encode()))
        ours = dict(headers)
        routing = {*_ROUTING, self._config.prefill_header.lower().encode()}
        without = [
            name.decode("latin-1")
            for name in request.first
            if name not in ours and (name in routing or name.startswith(OWN_PREFIX))
        ]
        return headers, without

    async def _read_body(self, slot: Slot) -> tuple[bytes, bool]:
        """The whole body, counted as it arrives, and whether trailers have followed."""
        pieces, num_bytes, most = list[bytes](), 0, self._router.services.config.max_body_bytes
        try:
            async with asyncio.timeout(self._limits.http_body_s):
                while True:
                    message = await self._read(self._limits.http_body_gap_s)
                    if message is grpc.aio.EOF:
                        raise InvalidRequest("the stream ended within a request's body")
                    if message.WhichOneof("request") == "request_trailers":
                        break
                    pieces.append(message.request_body.body)
                    num_bytes += len(pieces[-1])
                    if num_bytes > most:
                        raise BodyTooLarge(f"the request body is longer than {most} bytes")
                    slot.grow(len(pieces[-1]))
                    if message.request_body.end_of_stream:
                        break
        except TimeoutError as error:
            raise RequestTimeout("the request body did not arrive in time") from error
        slot.whole()
        return b"".join(pieces), message.WhichOneof("request") == "request_trailers"

    async def _read(self, within_s: float) -> messages.Message:
        try:
            async with asyncio.timeout(within_s):
                return _require_read(await self._stream.read())
        except TimeoutError as error:
            raise RequestTimeout("the request did not arrive in time") from error

    async def _follow(self) -> None:
        """Pass on what the gateway shows of the answer, until it ends the stream."""
        picked = self._picked
        assert picked is not None
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            _require_read(message)
            if message.WhichOneof("request") == "response_headers":
                headers = messages.read_headers(message.response_headers)
                status = dict(headers).get(b":status", b"")
                self._status = int(status) if status.isdigit() else 0
                picked.served_by(messages.served_by(message))
                picked.answered(self._status, headers)
            await self._stream.write(messages.passed_on(message, self._mode))

    def _close(self) -> None:
        """Give back everything that the request holds."""
        if self._picked is not None:
            self._picked.end()
        if self._tenant is not None:
            self._router.turns.end(self._tenant)
        if self._slot is not None:
            self._slot.close()


def _require_read(message: messages.Message) -> messages.Message:
    """The message, or the stream's end. Raises `InvalidRequest` for one that says nothing, or could not be decoded."""
    if message is not grpc.aio.EOF and message.WhichOneof("request") is None:
        raise InvalidRequest("a message of the gateway is none of Envoy's external processing")
    return message


def _read_head(message: messages.Message, arrived: float) -> ClientRequest:
    """A request without its body."""
    headers = messages.read_headers(message.request_headers)
    pseudo = {name: value.decode("latin-1") for name, value in headers if name.startswith(b":")}
    others = [one for one in headers if not one[0].startswith(b":")]
    target = pseudo.get(b":path", "")
    first = first_values(others)
    request_id = sane_request_id(first.get(REQUEST_ID, b"").decode("latin-1") or None).encode()
    return ClientRequest(
        pseudo.get(b":method", ""), target, target.partition("?")[0], others, first, b"", request_id, arrived
    )


def _client_of(request: ClientRequest) -> str:
    """The address that the gateway saw, as far as it tells."""
    return request.first.get(b"x-forwarded-for", b"gateway").rpartition(b",")[2].strip().decode("latin-1")
