"""Keys of a prompt's prefixes: shared exactly as far as the prompts are alike."""

from __future__ import annotations

import pytest

from kvferry.router.choice.prompt import (
    NO_PREFIX,
    chain_blocks,
    is_token_ids,
    read_token_ids,
    text_prefix,
)


def test_prompts_share_keys_as_far_as_they_are_alike() -> None:
    first = text_prefix(b"a" * 1000, b"model", 0.25)
    second = text_prefix(b"a" * 300 + b"b" * 700, b"model", 0.25)
    same = sum(one == other for one, other in zip(first.keys, second.keys, strict=True))
    assert same == 2, "sections end at 128 and 256 bytes"
    assert first.ends[:3] == [32.0, 64.0, 96.0]
    assert first.keys[0] != text_prefix(b"a" * 1000, b"another", 0.25).keys[0]


@pytest.mark.parametrize(("length", "number"), [(0, 0), (127, 0), (128, 1), (1024, 8), (4096, 14)])
def test_only_full_sections_have_keys(length: int, number: int) -> None:
    assert len(text_prefix(b"x" * length, b"", 1.0).keys) == number


def test_blocks_of_tokens_are_chained() -> None:
    tokens = [*range(10)]
    keys = [*chain_blocks(None, tokens, 4)]
    assert len(keys) == 2
    assert [*chain_blocks(keys[0], tokens[4:], 4)] == keys[1:], "the parent's key continues the chain"
    assert next(chain_blocks(None, [*range(1, 11)], 4)) != keys[0]
    assert [*chain_blocks(None, tokens, 16)] == []


def test_a_prompt_of_tokens_has_keys_of_its_blocks() -> None:
    prefix = text_prefix(b"[0,1,2,3]", b"", 0.5, [0, 1, 2, 3])
    assert prefix.block_keys(2) == [*chain_blocks(None, [0, 1, 2, 3], 2)]
    assert prefix.block_keys(2) is prefix.block_keys(2), "computed once"
    assert len(prefix.block_keys(4)) == 1
    assert NO_PREFIX.block_keys(4) == ()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (b"[1, 2]", [1, 2]),
        (b"  [ 7]", [7]),
        (b"[]", []),
        (b"[2147483648]", None),
        (b"[-1]", None),
        (b"[1.5]", None),
        (b'["a"]', None),
        (b"[1", None),
        (b"", None),
    ],
)
def test_token_ids_are_read_or_not_at_all(text: bytes, ids: list[int] | None) -> None:
    assert read_token_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "is_ids"),
    [(b" [ 1", True), (b"[[1]]", False), (b'["1"]', False), (b"", False), (b"[]", False), (b"1", False)],
)
def test_a_list_of_numbers_is_told_by_its_beginning(text: bytes, is_ids: bool) -> None:
    assert is_token_ids(text) == is_ids
