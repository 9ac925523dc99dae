"""The OpenAPI document, as others read it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from docs_site.vllm_api import engine_endpoints
from kvferry.api import requests
from kvferry.api.decoding import decode_body
from kvferry.api.openapi import ERROR_EXAMPLE, OPERATIONS, openapi_document
from kvferry.api.other_fields import REFUSED
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.openai import error_envelope

DOCUMENT = json.loads(openapi_document())


def validator(name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return OAS31Validator(schema)


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1")


def test_a_part_of_it_is_valid_by_itself() -> None:
    part = json.loads(openapi_document(of_router=True))
    validate(part)
    assert {"/v1/completions", "/v1/tokenize", "/ping"} < set(part["paths"]) < set(DOCUMENT["paths"])
    assert "post" not in part["paths"]["/ping"]
    assert "ReleaseRequest" not in part["components"]["schemas"]


def test_every_route_of_the_engine_is_in_it() -> None:
    stored = {path for path in DOCUMENT["paths"] if path.startswith("/v1/responses/{")}
    documented = {
        (method.upper(), re.sub(r"{\w+}", "*", path))
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
        if path not in stored
    }
    assert documented == engine_endpoints()
    assert len(stored) == 3


@pytest.mark.parametrize(
    ("operation", "example"),
    [(operation, example) for operation in OPERATIONS for example in operation.examples.values()],
)
def test_examples_are_examples(operation: Any, example: Any) -> None:
    kinds = [kind for kind in operation.body if all(name in example for name in required(kind))]
    assert kinds
    for kind in kinds:
        assert decode_body(msgspec.json.encode(example), kind).ignored == ()
        validator(kind.__name__).validate(example)


def required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.required]


def test_errors_are_as_they_are_described() -> None:
    validator("ErrorEnvelope").validate(ERROR_EXAMPLE)
    validator("ErrorEnvelope").validate(json.loads(error_envelope(InvalidRequest("no", param="n"))))
    for operation in OPERATIONS:
        responses = DOCUMENT["paths"][operation.path][operation.method]["responses"]
        assert set(responses) >= {"200", "default"}
        assert not operation.body or "400" in responses


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [None, 0, 1.5, 100], [-0.1, 101, "1"]),
        ("top_p", [1, 0.5], [0, 1.1]),
        ("n", [1, 5], [0, 1.5, True]),
        ("logit_bias", [{}, {"5": -100}], [{"5": 101}, {"x": 1}, []]),
        ("stop", ["a", ["a", "b"], None], ["", ["a"] * 33, 5]),
        ("tool_choice", ["auto", None], ["required", {"type": "function"}]),
        ("suffix", ["", None], ["end"]),
    ],
)
def test_schemas_say_what_is_accepted(name: str, good: list[Any], bad: list[Any]) -> None:
    schema = validator("CompletionRequest")
    for value in good:
        assert schema.is_valid({"prompt": "a", name: value}), value
    for value in bad:
        assert not schema.is_valid({"prompt": "a", name: value}), value


def test_every_field_of_a_request_is_there() -> None:
    for kind in (requests.CompletionRequest, requests.ChatCompletionRequest):
        properties = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == set(kind.__struct_fields__) | set(REFUSED)
