"""Marks of streams, and answers that are continued: read, refused, and named."""

from __future__ import annotations

import pytest
from msgspec import MsgspecError

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.continuation import (
    CONTINUE_KEY,
    Continuation,
    StreamMark,
    answer_name,
    decode_mark,
    is_last,
    parse_continuation,
)

SO_FAR = {"token_ids": [1, 2], "seed": 7, "created": 1_700_000_000}


def test_a_mark_is_a_comment_line_that_can_be_read_again() -> None:
    mark = StreamMark(tokens=[1, 2], seed=3, created=4, num_cached_tokens=5, answer="a")
    line = mark.encode()
    assert line.startswith(b": ")
    assert line.count(b"\n") == 1
    assert decode_mark(line.rstrip(b"\n")) == mark
    assert decode_mark(StreamMark().encode()[:-1]) == StreamMark()


@pytest.mark.parametrize("line", [b": ", b": {", b": []", b': {"tokens":["a"]}', b': {"tokens":[-1]}'])
def test_a_line_that_is_no_mark_is_refused(line: bytes) -> None:
    with pytest.raises(MsgspecError):
        decode_mark(line)


def test_the_last_mark_is_seen_without_decoding() -> None:
    assert is_last(StreamMark(tokens=[1], last=True).encode()[:-1])
    assert not is_last(StreamMark(tokens=[1]).encode()[:-1])


def test_a_request_may_continue_an_answer() -> None:
    assert parse_continuation(None) is None
    assert parse_continuation({"do_remote_prefill": True}) is None
    assert parse_continuation({CONTINUE_KEY: SO_FAR}) == Continuation(token_ids=[1, 2], seed=7, created=1_700_000_000)
    for seed in (-(2**63), 2**64 - 1):
        found = parse_continuation({CONTINUE_KEY: SO_FAR | {"seed": seed}})
        assert found is not None
        assert found.seed == seed


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"created": -1},
        {"created": 2**40},
        {"answer": "x" * 65},
        {"token_ids": [-1]},
        {"token_ids": "12"},
        {"num_cached_tokens": -1},
    ],
)
def test_an_answer_that_cannot_be_continued_names_its_field(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"kv_transfer_params\.continue_from: ") as caught:
        parse_continuation({CONTINUE_KEY: SO_FAR | change})
    assert caught.value.param == "kv_transfer_params"


def test_whatever_decides_an_answer_is_in_its_name() -> None:
    name = answer_name("sampler", {2, 1}, [1, 2, 3], "salt")
    assert len(name) == 32
    assert int(name, 16) >= 0
    assert answer_name("sampler", [1, 2], [1, 2, 3], "salt") == name, "the order of end tokens is no difference"
    others = {
        answer_name("another", {1, 2}, [1, 2, 3], "salt"),
        answer_name("sampler", {1}, [1, 2, 3], "salt"),
        answer_name("sampler", {1, 2}, [1, 2], "salt"),
        answer_name("sampler", {1, 2}, [1, 2, 3], ""),
        answer_name("sampler", {1, 2}, [1, 2, 3], "salt", "hermes"),
    }
    assert len(others | {name}) == 6
