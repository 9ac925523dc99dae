"""The JSON Schema Test Suite and SchemaStore's schemas (`make install-schemas`): nothing invalid is ever permitted, and
what is refused is named."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvferry.core.errors import GrammarFailed, InvalidRequest
from support.schemas import DRAFTS, SCHEMAS, is_installed

PERMITTED_ANYWAY = {
    ("ECMA 262 \\S matches everything but whitespace", "zero-width whitespace does not match"),
}
"""Rust's regular expressions do not count a byte order mark as whitespace."""

pytestmark = pytest.mark.skipif(not is_installed(), reason="make install-schemas fetches them")


@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_invalid_is_permitted(compiling: Any, draft: str) -> None:
    counts = Counter[str]()
    wrong = []
    for file in sorted((SCHEMAS / "suite" / draft).rglob("*.json")):
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema.setdefault("$schema", DRAFTS[draft])
            try:
                grammar = compiling.grammar("json", json.dumps(schema))
            except InvalidRequest:
                counts["refused"] += len(case["tests"])
                continue
            for test in case["tests"]:
                permits = compiling.permits(grammar, json.dumps(test["data"], ensure_ascii=False))
                counts[f"valid {test['valid']}, permitted {permits}"] += 1
                if permits and not test["valid"] and (case["description"], test["description"]) not in PERMITTED_ANYWAY:
                    wrong.append((file.name, case["description"], test["description"]))
    assert wrong == []
    assert counts["valid True, permitted True"] > 200, counts


def random_answer(compiling: Any, grammar: Any, draw: random.Random, max_tokens: int = 4000) -> str | None:
    """A random walk to the end of a grammar, which prefers to end; None if it is too long or fails at a limit."""
    matcher, tokens = grammar.matcher(), list[int]()
    while len(tokens) < max_tokens and not matcher.is_complete:
        try:
            mask = matcher.permitted()
            permitted = np.flatnonzero(np.unpackbits(mask, count=compiling.vocab_size, bitorder="little"))
            closing = [token for token in permitted if compiling.names[token][:1] in '"}],0123456789']
            token = int(draw.choice(closing if closing and draw.random() < 0.7 else list(permitted)))
            matcher.accept(token)
        except GrammarFailed:
            return None
        if token != compiling.eos:
            tokens.append(token)
    text = compiling.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return str(text) if matcher.is_complete else None


@pytest.mark.full
@pytest.mark.parametrize("part", range(16))
def test_random_answers_of_real_schemas_are_valid(compiling: Any, part: int) -> None:
    draw, num_valid = random.Random(part), 0
    for file in sorted((SCHEMAS / "store").glob("*.json"))[part::16]:
        try:
            schema = json.loads(file.read_text())
            grammar = compiling.grammar("json", json.dumps(schema))
        except (ValueError, InvalidRequest):  # some files are no JSON
            continue
        for _ in range(3):
            answer = random_answer(compiling, grammar, draw)
            if answer is not None:
                jsonschema.validators.validator_for(schema)(schema).validate(json.loads(answer))
                num_valid += 1
    assert num_valid > 0
