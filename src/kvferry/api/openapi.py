"""The OpenAPI 3.1 document, generated from the types of requests and answers.

The engine's server and the router serve the same document, each with its own routes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec

from kvferry import __version__
from kvferry.api import answers, requests
from kvferry.api.dialects.messages import COUNT_TOKENS_PATH, MESSAGES_PATH, CountTokensRequest, MessagesRequest
from kvferry.api.dialects.responses import INPUT_TOKENS_PATH, RESPONSES_PATH, InputTokensRequest, ResponsesRequest
from kvferry.api.other_fields import REFUSED
from kvferry.core.messages.dialects import AnthropicErrorBody
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.messages.openai import REQUEST_ID_HEADER, RETRY_AFTER_HEADER, ErrorEnvelope
from kvferry.core.sampling import SamplingParams

OPENAPI_PATH = "/openapi.json"

_REF = "#/components/schemas/{name}"
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"

Schema = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path. `answer` is a struct, or the schema of a small object; `events` the struct of a chunk, or
    the schema of an event; `error` the body of an error."""

    path: str
    method: str
    name: str
    summary: str
    body: tuple[type[msgspec.Struct], ...] = ()
    answer: type[msgspec.Struct] | Schema | None = None
    events: type[msgspec.Struct] | Schema | None = None
    examples: dict[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = ErrorEnvelope
    on_router: bool = True
    """True if the router has the path too."""


_GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 502, 503)
_BODY_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)
"""Errors of paths that read a body, and generate nothing."""


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_TYPED_EVENT: Schema = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": _JSON}},
    "description": "One server-sent event, where `stream` is true. Its data has the name of the event as `type`.",
}
_MESSAGE = _object(
    id={"type": "string"},
    type={"const": "message"},
    role={"const": "assistant"},
    model={"type": "string"},
    content={"type": "array", "items": {"type": "object", "required": ["type"]}},
    stop_reason={"type": ["string", "null"]},
    stop_sequence={"type": ["string", "null"]},
    usage={"type": "object", "required": ["input_tokens", "output_tokens"]},
)
_RESPONSE = _object(
    id={"type": "string"},
    object={"const": "response"},
    created_at={"type": "integer"},
    status={"enum": ["completed", "incomplete"]},
    model={"type": "string"},
    output={"type": "array", "items": {"type": "object", "required": ["type", "id"]}},
    usage={"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]},
)

_TOKENIZATION = (
    Operation(
        "/tokenize",
        "post",
        "tokenize",
        "Tokens of a text or of messages, as a generating route would have them.",
        (requests.TokenizeCompletionRequest, requests.TokenizeChatRequest),
        answers.Tokens,
        examples={"text": {"prompt": "Hello"}, "chat": {"messages": [{"role": "user", "content": "Hello"}]}},
        errors=_BODY_ERRORS,
    ),
    Operation(
        "/detokenize",
        "post",
        "detokenize",
        "The text of tokens, special ones written out.",
        (requests.DetokenizeRequest,),
        answers.Detokenized,
        examples={"tokens": {"tokens": [1, 2, 3]}},
        errors=_BODY_ERRORS,
    ),
)

OPERATIONS = (
    Operation(
        "/v1/completions",
        "post",
        "createCompletion",
        "Complete a prompt, or several.",
        (requests.CompletionRequest,),
        answers.Completion,
        answers.Completion,
        {
            "text": {"prompt": "The ferry leaves at", "max_tokens": 16},
            "stream": {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0, "stream": True},
            "tokens": {"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 2},
        },
        _GENERATION_ERRORS,
    ),
    Operation(
        "/v1/chat/completions",
        "post",
        "createChatCompletion",
        "Answer a conversation.",
        (requests.ChatCompletionRequest,),
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
        {
            "whole": {"messages": [{"role": "user", "content": "Where does the ferry go?"}], "max_tokens": 16},
            "stream": {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
                "max_tokens": 16,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
        _GENERATION_ERRORS,
    ),
    Operation(
        MESSAGES_PATH,
        "post",
        "createMessage",
        "Answer a conversation, as Anthropic's API does.",
        (MessagesRequest,),
        _MESSAGE,
        _TYPED_EVENT,
        {"whole": {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "Where does it go?"}]}},
        _GENERATION_ERRORS,
        AnthropicErrorBody,
    ),
    Operation(
        COUNT_TOKENS_PATH,
        "post",
        "countMessageTokens",
        "The number of tokens of a conversation, as Anthropic's API has it.",
        (CountTokensRequest,),
        _object(input_tokens={"type": "integer"}),
        examples={"one": {"model": "m", "messages": [{"role": "user", "content": "Where does it go?"}]}},
        errors=_BODY_ERRORS,
        error=AnthropicErrorBody,
    ),
    Operation(
        RESPONSES_PATH,
        "post",
        "createResponse",
        "Answer a conversation, whose earlier turns may be stored.",
        (ResponsesRequest,),
        _RESPONSE,
        _TYPED_EVENT,
        {"whole": {"input": "Where does the ferry go?", "max_output_tokens": 16}},
        _GENERATION_ERRORS,
    ),
    Operation(
        INPUT_TOKENS_PATH,
        "post",
        "countInputTokens",
        "The number of tokens of a response's input.",
        (InputTokensRequest,),
        _object(input_tokens={"type": "integer"}, object={"const": "response.input_tokens"}),
        examples={"text": {"input": "Where does the ferry go?"}},
        errors=_BODY_ERRORS,
    ),
    Operation(
        f"{RESPONSES_PATH}/{{response_id}}",
        "get",
        "getResponse",
        "A stored response.",
        answer=_RESPONSE,
        errors=(400, 404),
    ),
    Operation(
        f"{RESPONSES_PATH}/{{response_id}}",
        "delete",
        "deleteResponse",
        "Delete a stored response.",
        answer=_object(id={"type": "string"}, deleted={"const": True}),
        errors=(404,),
    ),
    Operation(
        f"{RESPONSES_PATH}/{{response_id}}/cancel",
        "post",
        "cancelResponse",
        "Refused: only responses in the background can be cancelled.",
        answer=_RESPONSE,
        errors=(400, 404),
    ),
    Operation(
        f"{RESPONSES_PATH}/{{response_id}}/input_items",
        "get",
        "listInputItems",
        "The input of a stored response, with earlier turns.",
        answer=_object(data={"type": "array"}, has_more={"type": "boolean"}, object={"const": "list"}),
        errors=(400, 404),
    ),
    Operation("/v1/models", "get", "listModels", "The names the model is served under.", answer=answers.ModelList),
    Operation(
        "/v1/models/{model}", "get", "getModel", "One of the models, by its name.", answer=answers.Model, errors=(404,)
    ),
    *_TOKENIZATION,
    *(replace(operation, path=f"/v1{operation.path}", name=f"{operation.name}V1") for operation in _TOKENIZATION),
    Operation(
        "/tokenizer_info",
        "get",
        "tokenizerInfo",
        "The tokenizer's class, special tokens and chat template.",
        answer=_object(tokenizer_class={"type": "string"}, vocab_size={"type": "integer"}),
    ),
    Operation(
        "/health",
        "get",
        "health",
        "200 while requests can be served.",
        answer=_object(status={"type": "string"}) | {"description": "An instance also says its `engine_id`."},
        errors=(503,),
    ),
    Operation(
        "/ping",
        "get",
        "ping",
        "As `/health`.",
        answer=_object(status={"type": "string"}),
        errors=(503,),
    ),
    Operation(
        "/ping",
        "post",
        "pingPost",
        "As `/health`.",
        answer=_object(status={"type": "string"}),
        errors=(503,),
        on_router=False,
    ),
    Operation(
        "/load",
        "get",
        "load",
        "The number of requests that run or wait.",
        answer=_object(server_load={"type": "integer"}),
        errors=(503,),
    ),
    Operation(
        "/server_info",
        "get",
        "serverInfo",
        "The version, and the facts for routers.",
        answer=_object(kvferry_version={"type": "string"}, instance={"type": "object"}),
        on_router=False,
    ),
    Operation(
        "/reset_prefix_cache",
        "post",
        "resetPrefixCache",
        "Evict the cached blocks that no request uses.",
        answer=_object(success={"type": "boolean"}),
        errors=(400, 503),
        on_router=False,
    ),
    Operation(
        "/abort_requests",
        "post",
        "abortRequests",
        "End running requests.",
        (requests.AbortRequest,),
        _object(aborted={"type": "integer"}),
        examples={"one": {"request_ids": ["cmpl-0123456789abcdef"]}},
        errors=_BODY_ERRORS,
        on_router=False,
    ),
    Operation("/metrics", "get", "metrics", "What Prometheus scrapes."),
    Operation("/version", "get", "version", "The version of kvferry.", answer=_object(version={"type": "string"})),
    Operation(
        "/kvferry/release",
        "post",
        "release",
        "Release a hand-off that no instance will fetch.",
        (requests.ReleaseRequest,),
        _object(released={"type": "boolean"}),
        examples={"one": {"transfer_id": "cmpl-0123456789abcdef"}},
        errors=_BODY_ERRORS,
        on_router=False,
    ),
    Operation(
        "/kvferry/kept",
        "post",
        "kept",
        "What the KV stores of this instance have of a prompt.",
        (requests.KeptRequest,),
        KeptBlocks,
        examples={"pinned": {"tokens": [1, 2, 3], "pin": True}, "unpinned": {"tokens": [1, 2, 3], "pin": False}},
        errors=_BODY_ERRORS,
        on_router=False,
    ),
    Operation(
        "/kvferry/instance",
        "get",
        "instance",
        "What a router should know of this instance.",
        answer={"type": "object"},
        on_router=False,
    ),
    Operation(
        "/kvferry/check",
        "get",
        "check",
        "Whether blocks or leases are held although no request runs.",
        answer=_object(ok={"type": "boolean"}),
        errors=(500, 503),
        on_router=False,
    ),
    Operation(OPENAPI_PATH, "get", "openapi", "This document.", answer={"type": "object"}),
)
"""All routes of the engine's server."""

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The server has keys, and the request brings none of them.",
    404: "There is no such model, stored response or path.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    429: "The queue is full: come back later.",
    500: "An unexpected error; the log has it under the request id.",
    502: "The KV of this request could not be loaded, and `kv_load_failure_policy` is `fail`.",
    503: "Nothing is there to serve the request now, or the server is about to end.",
}

ERROR_EXAMPLE = {
    "error": {
        "message": "unknown field 'max_token'; did you mean 'max_tokens'?",
        "type": "invalid_request_error",
        "param": "max_token",
        "code": None,
    }
}


@cache
def openapi_document(*, of_router: bool = False) -> bytes:
    """The document of an instance, or of a router, as JSON."""
    operations = [operation for operation in OPERATIONS if operation.on_router or not of_router]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry",
            "version": __version__,
            "summary": "An OpenAI-compatible server that prefills and decodes on different instances.",
            "description": "Fields that are unknown are passed over and named in the header X-Kvferry-Warning; a name"
            " that is nearly a known one is refused. Every error has the same envelope.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "paths": _paths(operations),
        "components": {
            "schemas": _schemas(operations),
            "responses": {f"Error{status}": _error(status) for status in _ERRORS},
            "headers": _headers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _paths(operations: Collection[Operation]) -> Schema:
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return paths


def _operation(operation: Operation) -> Schema:
    errors = {str(status): _error_of(operation, status) for status in operation.errors}
    written: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": _success(operation),
            **errors,
            "default": {"description": "Another error.", "content": {_JSON: {"schema": _schema(operation.error)}}},
        },
    }
    if operation.body:
        written["requestBody"] = _request_body(operation)
    if names := re.findall(r"{(\w+)}", operation.path):
        written["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return written


def _error_of(operation: Operation, status: int) -> Schema:
    if operation.error is ErrorEnvelope:
        return {"$ref": f"#/components/responses/Error{status}"}
    described = _error(status)
    return {**described, "content": {_JSON: {"schema": _schema(operation.error)}}}


def _request_body(operation: Operation) -> Schema:
    schemas = [_schema(body_type) for body_type in operation.body]
    return {
        "required": True,
        "content": {
            _JSON: {
                "schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas},
                "examples": {name: {"value": value} for name, value in operation.examples.items()},
            }
        },
    }


def _success(operation: Operation) -> Schema:
    if operation.answer is None:
        return {"description": operation.summary, "content": {_TEXT: {"schema": {"type": "string"}}}}
    content: Schema = {_JSON: {"schema": _schema(operation.answer)}}
    if operation.events is not None:
        content[_EVENTS] = {"schema": _event(operation.events)}
    headers = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
    if operation.body:
        headers["X-Kvferry-Warning"] = {"$ref": "#/components/headers/Warning"}
    return {"description": operation.summary, "headers": headers, "content": content}


def _event(chunk: type[msgspec.Struct] | Schema) -> Schema:
    if isinstance(chunk, dict):
        return chunk
    payload = {"anyOf": [_schema(chunk), _schema(ErrorEnvelope)]}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": _JSON, "contentSchema": payload}]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": data},
        "description": "One server-sent event, where `stream` is true. Its data is a chunk as JSON, or the envelope of"
        " an error; the last event's data is [DONE].",
    }


def _error(status: int) -> Schema:
    headers = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
    if status in (429, 503):
        headers[RETRY_AFTER_HEADER] = {"$ref": "#/components/headers/RetryAfter"}
    content: Schema = {"schema": _schema(ErrorEnvelope)}
    if status == 400:
        content["examples"] = {"typo": {"value": ERROR_EXAMPLE}}
    return {"description": _ERRORS[status], "headers": headers, "content": {_JSON: content}}


def _headers() -> Schema:
    return {
        "RequestId": {
            "description": "Names the request in logs; the client's own if it sent one.",
            "schema": {"type": "string"},
        },
        "RetryAfter": {"description": "Seconds to wait.", "schema": {"type": "string"}},
        "Warning": {
            "description": "Fields of the request that had no effect, and tools that cannot be called.",
            "schema": {"type": "string"},
        },
    }


def _schema(kind: type[msgspec.Struct] | Schema) -> Schema:
    return kind if isinstance(kind, dict) else {"$ref": _REF.format(name=kind.__name__)}


def _schemas(operations: Collection[Operation]) -> Schema:
    kinds: list[Any] = [ErrorEnvelope]
    for operation in operations:
        types = (*operation.body, operation.answer, operation.events, operation.error)
        kinds += [each_type for each_type in types if isinstance(each_type, type) and each_type not in kinds]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in (requests.CompletionRequest, requests.ChatCompletionRequest):
        if kind in kinds:
            _add_ranges(schemas[kind.__name__]["properties"])
            _add_unsupported(schemas[kind.__name__]["properties"])
    return dict(schemas)


def _add_ranges(properties: Schema) -> None:
    """Add the ranges that sampling accepts, and the minimum of counts."""
    ranges = [(name, low, high) for name, _, low, high in SamplingParams().ranges() if name != "seed"]
    for name, low, high in [
        *ranges,
        ("top_logprobs", 0, 20),
        ("n", 1, math.inf),
        ("max_completion_tokens", 1, math.inf),
    ]:
        for schema in properties.get(name, {}).get("anyOf", ()):
            if schema["type"] in ("number", "integer"):
                schema["minimum"] = low
                if math.isfinite(high):
                    schema["maximum"] = high
    share = properties["top_p"]["anyOf"][0]
    share["exclusiveMinimum"] = share.pop("minimum")
    stop = properties["stop"]["anyOf"]
    stop[0]["minLength"] = stop[1]["items"]["minLength"] = 1
    bias = properties["logit_bias"]["anyOf"][0]
    bias["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
    bias["additionalProperties"] |= {"minimum": -100, "maximum": 100}


def _add_unsupported(properties: Schema) -> None:
    for name, refusal in REFUSED.items():
        if name not in properties:  # completions have a field that chats do not have
            properties[name] = {
                "description": f"Known, and refused when it asks for something: {refusal.reason}.",
                "enum": [None, *refusal.harmless],
            }
