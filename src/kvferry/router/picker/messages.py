"""Messages of Envoy's external processing: reads a request's messages, and makes the answers. Only this package imports
the dependencies of `kvferry[picker]`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from kvferry.core.errors import RequestError
from kvferry.core.messages.dialects import dialect_of
from kvferry.http.headers import RawHeaders
from kvferry.http.server.response import answer_headers

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of dynamic metadata, with the chosen endpoints."""
_SERVED, _SUBSET = f"{DESTINATION}-served", f"{DESTINATION}-subset"
_NAMESPACE, _SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"
_CHUNK_BYTES = 64 * 1024
"""Maximum number of bytes of a body in one message; gRPC takes 4 MiB, and Envoy's buffers are smaller."""

Message = Any
"""A `ProcessingRequest` or a `ProcessingResponse`; the generated classes have no types."""

FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED


def read_headers(message: Message) -> RawHeaders:
    """The headers of `request_headers` or `response_headers`, names in lower case; HTTP/2's pseudo-headers begin with a
    colon."""
    return [
        (header.key.lower().encode(), header.raw_value or header.value.encode()) for header in message.headers.headers
    ]


def subset_of(message: Message) -> Collection[str] | None:
    """The endpoints among which the gateway lets the picker choose; None: any."""
    metadata = message.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if metadata is None or _SUBSET not in metadata.fields:
        return None
    value = metadata.fields[_SUBSET]
    endpoints = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return {endpoint.strip() for endpoint in endpoints}


def served_by(message: Message) -> str:
    """The endpoint that answers, from the gateway's metadata of the answer's headers; empty if missing."""
    metadata = message.metadata_context.filter_metadata.get(_NAMESPACE)
    return "" if metadata is None or _SERVED not in metadata.fields else str(metadata.fields[_SERVED].string_value)


def destination(endpoints: str, headers: RawHeaders, without: Iterable[str]) -> Message:
    """The answer to a request's headers: its endpoints, headers to set, and headers to remove."""
    mutation = ext_proc.HeaderMutation(
        set_headers=_options([(DESTINATION.encode(), endpoints.encode()), *headers]), remove_headers=without
    )
    metadata = struct_pb2.Struct()
    metadata.update({_NAMESPACE: {DESTINATION: endpoints}})
    return ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse(header_mutation=mutation)),
        dynamic_metadata=metadata,
    )


def request_body(body: bytes, *, ends: bool) -> Iterator[Message]:
    """The answers to a request's body. `ends`: no trailers follow."""
    view = memoryview(body)
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        chunk = view[start : start + _CHUNK_BYTES].tobytes()
        last = ends and start + _CHUNK_BYTES >= len(body)
        yield ext_proc.ProcessingResponse(request_body=_streamed(chunk, last))


def request_trailers() -> Message:
    """The answer to a request's trailers, which are forwarded unchanged."""
    return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


def forwarded(message: Message, mode: int) -> Message:
    """The answer to a message about the response, which is forwarded unchanged. `mode`: the gateway's body mode."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        return ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
    if kind == "response_trailers":
        return ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())
    if mode != FULL_DUPLEX:
        return ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse())
    body = message.response_body
    return ext_proc.ProcessingResponse(response_body=_streamed(body.body, body.end_of_stream))


def refusal(error: RequestError, path: str, request_id: str) -> Message:
    """The error response to a request for `path`, which no instance gets."""
    headers = [(b"content-type", b"application/json"), *answer_headers(error)]
    return ext_proc.ProcessingResponse(
        immediate_response=ext_proc.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=error.status),
            headers=ext_proc.HeaderMutation(set_headers=_options(headers)),
            body=dialect_of(path).body(error, request_id),
            details="kvferry_picker",
        )
    )


def _streamed(body: bytes, ends: bool) -> Message:
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=ends)
    return ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=streamed))
    )


def _options(headers: RawHeaders) -> list[Message]:
    action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name.decode("latin-1"), raw_value=value), append_action=action
        )
        for name, value in headers
    ]
