"""Messages of Envoy's external processing: what a request's say, and those that answer them. Only this module and its
neighbours import what `kvferry[picker]` brings."""

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
"""Most bytes in one message of a body that is sent on; gRPC takes 4 MiB, and Envoy's buffers are smaller."""

Message = Any
"""A `ProcessingRequest` or a `ProcessingResponse`; the generated classes have no types."""

FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED


def read_headers(message: Message) -> RawHeaders:
    """The headers of `request_headers` or `response_headers`, names in lower case; those of HTTP/2 begin with a
    colon."""
    return [(one.key.lower().encode(), one.raw_value or one.value.encode()) for one in message.headers.headers]


def subset_of(message: Message) -> Collection[str] | None:
    """The endpoints of which one must be chosen; None: any."""
    found = message.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if found is None or _SUBSET not in found.fields:
        return None
    value = found.fields[_SUBSET]
    named = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return {one.strip() for one in named}


def served_by(message: Message) -> str:
    """The endpoint that answers, as the gateway says with the answer's headers; empty if it does not."""
    found = message.metadata_context.filter_metadata.get(_NAMESPACE)
    return "" if found is None or _SERVED not in found.fields else str(found.fields[_SERVED].string_value)


def destination(endpoints: str, headers: RawHeaders, without: Iterable[str]) -> Message:
    """Answers a request's headers: where it goes, other headers to set, and those to remove."""
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
    """Answers a request's body. `ends`: no trailers follow."""
    view = memoryview(body)
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        chunk = view[start : start + _CHUNK_BYTES].tobytes()
        last = ends and start + _CHUNK_BYTES >= len(body)
        yield ext_proc.ProcessingResponse(request_body=_streamed(chunk, last))


def request_trailers() -> Message:
    """Answers a request's trailers: they go on as they are."""
    return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


def passed_on(message: Message, mode: int) -> Message:
    """Answers what comes of the answer: it goes on as it is. `mode`: how the gateway sends bodies."""
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
    """The client's answer to a request for `path`, without any instance."""
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
