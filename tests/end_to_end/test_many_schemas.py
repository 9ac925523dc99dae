"""Schemas of the JSON Schema Test Suite and of SchemaStore (`make install-schemas`) over prefill and decode: whatever
compiles, its answers are valid, and those of one instance."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import jsonschema_rs
import pytest

from support.processes import Cluster, KvferryProcess, cluster, kvferry
from support.schemas import DRAFTS, SCHEMAS, is_installed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="make install-schemas fetches them"),
]

NUM_PARTS = 16
NUM_DEFINITIONS = 3
"""Number of definitions of one of SchemaStore's schemas that are also used by themselves."""
MAX_TOKENS = 400
AT_ONCE = 8
ENDS = ('"', '"}', "}", "]", "},", "0", "1", "2", "true", "null")
"""Texts that are preferred, so that answers of a random model come to their ends."""


@pytest.fixture(scope="module")
def alone(model_maker: Any, tmp_path_factory: Any) -> Iterator[KvferryProcess]:
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    log = tmp_path_factory.mktemp("alone") / "log"
    with kvferry("serve", str(model_maker("llama")), "--prefill=0", *options, log=log) as process:
        yield process


@pytest.fixture(scope="module")
def disaggregated(model_maker: Any, tmp_path_factory: Any) -> Iterator[Cluster]:
    with cluster(model_maker("llama"), tmp_path_factory.mktemp("disaggregated")) as started:
        yield started
        started.require_clean()


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas by their names, each once."""
    seen = set()
    for draft, url in DRAFTS.items():
        for file in sorted((SCHEMAS / "suite" / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(schema := case["schema"], dict) and (text := json.dumps(schema)) not in seen:
                    seen.add(text)
                    yield f"{draft} {file.stem}: {case['description']}", {"$schema": url, **schema}
    for file in sorted((SCHEMAS / "store").glob("*.json")):
        try:
            schema = json.loads(file.read_text())
        except ValueError:  # some files are no JSON
            continue
        yield file.stem, schema
        for key in ("definitions", "$defs"):
            head = {name: schema[name] for name in ("$schema", key) if name in schema}
            for name in sorted(schema.get(key, {}))[:NUM_DEFINITIONS]:
                yield f"{file.stem}, {name}", {**head, "$ref": f"#/{key}/{quote(name)}"}


def answer(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The text and finish reason of an answer, joined where it is streamed; or the error."""
    events, text, finish_reason = [], "", None
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            return {"status": response.status_code, "error": json.loads(response.read())["error"]["message"]}
        if body["stream"]:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
            events = [json.loads(line) for line in lines]
        else:
            events = [json.loads(response.read())]
    for event in events:
        if "error" in event:
            return {"status": response.status_code, "error": event["error"]["message"]}
        for choice in event["choices"]:
            text, finish_reason = text + choice["text"], choice["finish_reason"] or finish_reason
    return {"text": text, "finish_reason": finish_reason}


def require_valid(schema: dict[str, Any], document: Any) -> None:
    """Raises a `ValidationError`."""
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(document)
    except re.error:  # Python's expressions have no \\p, which ECMA's have
        jsonschema_rs.validate(schema, document)


def body_of(number: int, schema: dict[str, Any], bias: dict[str, float]) -> dict[str, Any]:
    """A request; of four, one is greedy, and every other one is streamed."""
    sampling = {"temperature": 0} if number % 4 == 0 else {"temperature": 0.9, "seed": number}
    asked = (
        {"structured_outputs": {"json": schema}}
        if number % 3
        else {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    )
    stream = {"stream": number % 2 == 1, "max_tokens": MAX_TOKENS, "logit_bias": bias}
    return {"prompt": f"Document {number}: ", **stream, **sampling, **asked}


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_answers_are_valid_and_those_of_one_instance(part: int, alone: KvferryProcess, disaggregated: Cluster) -> None:
    tokens = [alone.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] for text in ENDS]
    bias = {str(token): 9.0 for (token, *rest) in tokens if not rest}
    numbered = list(enumerate(schemas()))[part::NUM_PARTS]
    counts = Counter[str]()

    def both(entry: tuple[int, tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any], Any, Any]:
        number, (name, schema) = entry
        body = body_of(number, schema, bias)
        with httpx.Client(timeout=90) as client:
            return name, schema, answer(client, alone.url, body), answer(client, disaggregated.router.url, body)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, schema, expected, result in pool.map(both, numbered):
            if "error" in result and result.get("status") == expected.get("status") == 400:
                counts["refused"] += 1  # of several keywords, another one may be named each time
                continue
            assert result == expected, name
            assert "error" not in result, (name, result)
            counts["answered"] += 1
            if result["finish_reason"] == "stop":
                counts["complete"] += 1
                require_valid(schema, json.loads(result["text"]))
    print(f"\npart {part}: {dict(counts)}")
    assert counts["complete"] > counts["answered"] / 2 > 0
