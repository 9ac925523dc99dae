"""One request of a gateway, from its headers to the end of its answer: a stream of Envoy's external processing.

The body comes in chunks (FULL_DUPLEX_STREAMED) and is read completely, because the choice depends on the prompt. The
gateway then gets the endpoints and the body. It reports the beginning of the answer, and ends the stream at the end of
the answer.
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
from kvferry.router.request.leg import MAX_RETRY_AFTER_S

logger = logging.getLogger(__name__)

_ROUTING = (b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port", b"x-data-parallel-rank")
"""Headers by which an instance, or llm-d's sidecar, routes requests; clients must not set them."""

_CERTIFICATE_PROPERTY = "x509_pem_cert"
"""Property in gRPC's authentication context of a gateway with a certificate of a trusted authority."""


class ProcessedRequest:
    """One stream. Owns the request's share in the router's limits, and in the load of its instances, until the request
    ends."""

    def __init__(self, router: Router, config: PickerConfig, limits: HttpLimits, stream: Any) -> None:
        self._router, self._config, self._limits, self._stream = router, config, limits, stream
        max_pause_s = MAX_RETRY_AFTER_S if _CERTIFICATE_PROPERTY in stream.auth_context() else config.unproven_pause_s
        self._picker = Picker(router.services, config.fallbacks, max_pause_s)
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
            # A fault in one request ends this request only.
            logger.exception("request %s failed", self._id)
            await self._refuse(internal_error(self._id))
        finally:
            self._close()
            metrics.request_done(self._path, self._status or CLIENT_GONE, clock.monotonic() - begun)

    async def _refuse(self, error: RequestError) -> None:
        self._status = error.status
        await self._stream.write(messages.refusal(error, self._path, self._id))

    async def _choose(self) -> None:
        """Send the gateway the endpoints and the body. Raises `RequestError` as the client's answer."""
        router, stream = self._router, self._stream
        message = await self._read(self._limits.http_header_s)
        if message is grpc.aio.EOF or message.WhichOneof("request") != "request_headers":
            raise InvalidRequest("the gateway must send a request's headers first (request_header_mode: SEND)")
        self._read_modes(message)
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
            for chunk in messages.request_body(sent, ends=not has_trailers):
                await stream.write(chunk)
        if has_trailers:
            await stream.write(messages.request_trailers())

    def _read_modes(self, message: messages.Message) -> None:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.response_body_mode
            if (
                message.protocol_config.request_body_mode != messages.FULL_DUPLEX
                and not message.request_headers.end_of_stream
            ):
                raise RequestError("the gateway must send bodies with request_body_mode: FULL_DUPLEX_STREAMED")

    def _headers(self, picked: Picked, request: ClientRequest, num_bytes: int | None) -> tuple[RawHeaders, list[str]]:
        """The headers to set, and the names of headers to remove. `num_bytes`: length of the body, if it has
        changed."""
        services = self._router.services
        headers: RawHeaders = [*services.connections.authorization, (REQUEST_ID, self._id.encode())]
        if picked.prefill is not None:
            headers.append((self._config.prefill_header.lower().encode(), endpoint_of(picked.prefill).encode()))
        if num_bytes is not None:
            headers.append((b"content-length", str(num_bytes).encode()))
        own_names = dict(headers)
        routing = {*_ROUTING, self._config.prefill_header.lower().encode()}
        removed = [
            name.decode("latin-1")
            for name in request.first
            if name not in own_names and (name in routing or name.startswith(OWN_PREFIX))
        ]
        return headers, removed

    async def _read_body(self, slot: Slot) -> tuple[bytes, bool]:
        """Read the whole body, which is counted as it arrives; also return True if trailers have followed."""
        chunks, num_bytes, max_bytes = list[bytes](), 0, self._router.services.config.max_body_bytes
        try:
            async with asyncio.timeout(self._limits.http_body_s):
                while True:
                    message = await self._read(self._limits.http_body_gap_s)
                    if message is grpc.aio.EOF:
                        raise InvalidRequest("the stream ended within a request's body")
                    if message.WhichOneof("request") == "request_trailers":
                        break
                    chunks.append(message.request_body.body)
                    num_bytes += len(chunks[-1])
                    if num_bytes > max_bytes:
                        raise BodyTooLarge(f"the request body is longer than {max_bytes} bytes")
                    slot.grow(len(chunks[-1]))
                    if message.request_body.end_of_stream:
                        break
        except TimeoutError as error:
            raise RequestTimeout("the request body did not arrive in time") from error
        slot.mark_complete()
        return b"".join(chunks), message.WhichOneof("request") == "request_trailers"

    async def _read(self, timeout_s: float) -> messages.Message:
        try:
            async with asyncio.timeout(timeout_s):
                return _require_read(await self._stream.read())
        except TimeoutError as error:
            raise RequestTimeout("the request did not arrive in time") from error

    async def _follow(self) -> None:
        """Answer the gateway's messages about the response, until it ends the stream."""
        picked = self._picked
        assert picked is not None
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            _require_read(message)
            if message.WhichOneof("request") == "response_headers":
                headers = messages.read_headers(message.response_headers)
                status = dict(headers).get(b":status", b"")
                self._status = int(status) if status.isdigit() else 0
                picked.served_by(messages.served_by(message))
                picked.on_answered(self._status, headers)
            await self._stream.write(messages.forwarded(message, self._mode))

    def _close(self) -> None:
        """Release the request's share in limits and loads."""
        if self._picked is not None:
            self._picked.end()
        if self._tenant is not None:
            self._router.turns.end(self._tenant)
        if self._slot is not None:
            self._slot.close()


def _require_read(message: messages.Message) -> messages.Message:
    """Return the message, or the stream's end. Raises `InvalidRequest` if it is empty, or could not be decoded."""
    if message is not grpc.aio.EOF and message.WhichOneof("request") is None:
        raise InvalidRequest("a message of the gateway is none of Envoy's external processing")
    return message


def _read_head(message: messages.Message, arrived: float) -> ClientRequest:
    """Parse a request's head."""
    headers = messages.read_headers(message.request_headers)
    pseudo = {name: value.decode("latin-1") for name, value in headers if name.startswith(b":")}
    plain_headers = [header for header in headers if not header[0].startswith(b":")]
    target = pseudo.get(b":path", "")
    first = first_values(plain_headers)
    request_id = sane_request_id(first.get(REQUEST_ID, b"").decode("latin-1") or None).encode()
    return ClientRequest(
        pseudo.get(b":method", ""), target, target.partition("?")[0], plain_headers, first, b"", request_id, arrived
    )


def _client_of(request: ClientRequest) -> str:
    """The client's address, from the gateway's headers."""
    return request.first.get(b"x-forwarded-for", b"gateway").rpartition(b",")[2].strip().decode("latin-1")
