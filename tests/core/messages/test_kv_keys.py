"""Keys of KV in a request: in both places, for one prompt and for several, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.kv_keys import (
    LOAD_FIELD,
    MAX_KEY_BYTES,
    MAX_KEYS,
    PREFIX_FIELD,
    STORE_FIELD,
    TTL_FIELD,
    WAIT_FIELD,
    KVTransferParams,
    parse_transfer_params,
    shares,
)


def parse(params: dict[str, Any] | None, num_prompts: int = 1, **beside: Any) -> list[KVTransferParams | None]:
    return parse_transfer_params(params, beside, num_prompts=num_prompts)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {PREFIX_FIELD: None, STORE_FIELD: None, LOAD_FIELD: None},
        {PREFIX_FIELD: [None], STORE_FIELD: [None], LOAD_FIELD: [None]},
        {STORE_FIELD: [], LOAD_FIELD: [[]]},
        {"do_remote_decode": True},
    ],
)
def test_requests_without_keys(params: dict[str, Any] | None) -> None:
    assert parse(params) == [None]
    assert parse(None, 3) == [None] * 3


def test_one_prompt_in_either_place() -> None:
    fields = {PREFIX_FIELD: [1, 2, 3], STORE_FIELD: ["a", None, "b"], TTL_FIELD: 60}
    [within] = parse(fields)
    assert within == KVTransferParams(
        prefix_prompt_ids=(1, 2, 3), kvcache_store_keys=("a", None, "b"), kvcache_ttl_s=60.0
    )
    assert parse(None, **fields) == parse(fields, **fields) == [within]
    assert parse({STORE_FIELD: [["a"]]}) == parse({STORE_FIELD: ["a"]})
    assert within.stores
    assert not within.loads


def test_several_prompts() -> None:
    first, second, third = parse(
        {PREFIX_FIELD: [None, [1, 2], None], LOAD_FIELD: [None, ["k1", "k2"], ["k3"]]}, num_prompts=3
    )
    assert first is None
    assert second == KVTransferParams(prefix_prompt_ids=(1, 2), kvcache_load_keys=("k1", "k2"))
    assert third == KVTransferParams(kvcache_load_keys=("k3",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (STORE_FIELD, "key"),
        (STORE_FIELD, {"a": 1}),
        (STORE_FIELD, [1]),
        (STORE_FIELD, ["a", ["b"]]),
        (STORE_FIELD, [["a"], ["b"]]),
        (STORE_FIELD, [""]),
        (STORE_FIELD, ["x" * (MAX_KEY_BYTES + 1)]),
        (STORE_FIELD, ["é" * (MAX_KEY_BYTES // 2 + 1)]),
        (LOAD_FIELD, ["k"] * (MAX_KEYS + 1)),
        (LOAD_FIELD, [True]),
        (LOAD_FIELD, [["k", 5]]),
        (PREFIX_FIELD, [1, None]),
        (PREFIX_FIELD, [True]),
        (PREFIX_FIELD, [-1]),
        (PREFIX_FIELD, [1.5]),
        (PREFIX_FIELD, [2**31]),
        (PREFIX_FIELD, 7),
        (TTL_FIELD, 0),
        (TTL_FIELD, "60"),
        (TTL_FIELD, float("nan")),
        (WAIT_FIELD, -1),
        (WAIT_FIELD, True),
        (WAIT_FIELD, float("inf")),
    ],
)
def test_what_is_refused_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        parse({field: value})
    assert refused.value.param == field
    with pytest.raises(InvalidRequest, match=field):
        parse(None, **{field: value})


def test_keys_for_several_prompts_are_one_list_for_each() -> None:
    for value in (["a"], [["a"]], [["a"], ["b"], ["c"]]):
        with pytest.raises(InvalidRequest, match=STORE_FIELD):
            parse({STORE_FIELD: value}, num_prompts=2)


def test_two_places_must_agree() -> None:
    with pytest.raises(InvalidRequest, match="given twice"):
        parse({STORE_FIELD: ["a"]}, **{STORE_FIELD: ["b"]})


def test_keys_up_to_the_bound_are_accepted() -> None:
    keys = ["k", "\0", "../../etc/passwd", "/", "ключ 🗝", "x" * MAX_KEY_BYTES, "é" * (MAX_KEY_BYTES // 2), "\ud800"]
    [read] = parse({STORE_FIELD: keys, LOAD_FIELD: [str(number) for number in range(MAX_KEYS)]})
    assert read is not None
    assert list(read.kvcache_store_keys) == keys


def test_the_prefix_must_begin_the_prompt() -> None:
    params = KVTransferParams(prefix_prompt_ids=(1, 2, 3))
    assert params.num_prefix_tokens([1, 2, 3, 4]) == 3
    assert KVTransferParams().num_prefix_tokens([1, 2]) == 2
    for prompt in ([1, 2], [1, 2, 4], []):
        with pytest.raises(InvalidRequest, match="first tokens") as refused:
            params.num_prefix_tokens(prompt)
        assert refused.value.param == PREFIX_FIELD


def test_keys_divide_the_blocks_in_order() -> None:
    assert shares(5, 1) == [(0, 5)]
    assert shares(3, 3) == [(0, 1), (1, 2), (2, 3)]
    assert shares(5, 2) == [(0, 2), (2, 5)]
    assert shares(0, 2) == [(0, 0), (0, 0)]
    for num_blocks in range(12):
        for num_keys in range(1, 20):
            found = shares(num_blocks, num_keys)
            assert len(found) == num_keys
            assert {block for first, last in found for block in range(first, last)} == set(range(num_blocks))
            assert all(0 <= first <= last <= num_blocks for first, last in found)
            assert all(first < last for first, last in found) or not num_blocks
