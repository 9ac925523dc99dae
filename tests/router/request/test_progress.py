"""The events of a stream on their way: whole, without marks, however the chunks are cut, and bounded."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.continuation import StreamMark
from kvferry.router.instances.instance import VllmFacts
from kvferry.router.request.progress import Progress, ResumableStream
from kvferry.router.request.replay import Replay

DONE = b"data: [DONE]\n\n"
STREAM = [
    (StreamMark(seed=5, created=7, num_cached_tokens=3, answer="name"), b'data: {"a":1}\n\n'),
    (StreamMark(tokens=[11, 12]), b'data: {"a":2}\n\n'),
    (StreamMark(tokens=[13]), b'data: {"a":": {}"}\n\n'),
    (StreamMark(tokens=[14], last=True), b'data: {"finish_reason":"stop"}\n\n'),
]


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000])
def test_chunks_of_any_size(size: int) -> None:
    body = b"".join(mark.encode() + event for mark, event in STREAM) + b"data: {}\n\n" + DONE
    progress, passed = Progress(), b""
    for place in range(0, len(body), size):
        passed += progress.take(body[place : place + size])
        assert not passed or passed.endswith(b"\n\n")
    assert passed == b"".join(event for _, event in STREAM[:3])
    assert progress.closing == STREAM[3][1] + b"data: {}\n\n" + DONE
    told = progress.fields()["kv_transfer_params"]["continue_from"]
    assert (told.token_ids, told.seed, told.created, told.num_cached_tokens) == ([11, 12, 13], 5, 7, 3)
    assert told.answer == "name"


@pytest.mark.parametrize("last", [[], [14], [14, 15, 16]])
def test_tokens_are_counted_from_the_second_to_the_last(last: list[int]) -> None:
    progress = Progress()
    stream = [*STREAM[:3], (StreamMark(tokens=last, last=True), STREAM[3][1])]
    progress.take(b"".join(mark.encode() + event for mark, event in stream) + DONE)
    assert progress.count_tokens() == 2 + len(last)


def test_many_marks_are_kept_as_numbers() -> None:
    progress = Progress()
    progress.take(STREAM[0][0].encode() + STREAM[0][1])
    for token in range(3000):
        progress.take(StreamMark(tokens=[token]).encode() + STREAM[1][1])
    assert len(progress._marks) <= 256
    assert progress.fields()["kv_transfer_params"]["continue_from"].token_ids == list(range(3000))


def test_what_another_brings_takes_the_place_of_what_was_held_back() -> None:
    progress = Progress()
    progress.take(b"".join(mark.encode() + event for mark, event in STREAM) + b"data: par")
    progress.restart()
    assert progress.closing is None
    assert progress.take(STREAM[1][0].encode() + STREAM[1][1]) == STREAM[1][1]


@pytest.mark.parametrize(
    "mark", [b": nonsense\n", b": []\n", b': {"tokens":[-1]}\n', b': {"tokens":["x"]}\n', b": \xff\n"]
)
def test_marks_that_are_none(mark: bytes) -> None:
    progress = Progress()
    progress.take(mark + STREAM[0][1])
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        progress.fields()


@pytest.mark.parametrize("passage", [Progress(), Replay(VllmFacts)])
def test_nothing_is_held_without_end(passage: ResumableStream) -> None:
    with pytest.raises(ProtocolError):
        feed(passage, b"x" * 2**20)


def test_the_end_of_a_stream_has_an_end() -> None:
    progress = Progress()
    progress.take(STREAM[3][0].encode() + STREAM[3][1])
    with pytest.raises(ProtocolError):
        feed(progress, b"data: " + b"x" * 2**20 + b"\n\n")


def feed(passage: ResumableStream, chunk: bytes) -> None:
    for _ in range(100):
        passage.take(chunk)


def test_what_passed_unread_counts_as_if_it_had_been_read() -> None:
    body = [mark.encode() + event for mark, event in STREAM]
    one, other = Progress(), Progress()
    for passage in (one, other):
        passage.take(body[0])
    pattern = one.pattern()
    assert pattern is not None
    assert body[1].startswith(pattern.prefix)
    one.on_forwarded(b"".join(mark.encode() for mark, _ in STREAM[1:3]))
    other.take(body[1] + body[2])
    for passage in (one, other):
        passage.take(body[3] + b"data: {}\n\n" + DONE)
        assert passage.pattern() is None
    assert (one.fields(), one.closing) == (other.fields(), other.closing)


@pytest.mark.parametrize("mark", [b': {"a":' + b"[" * 5000 + b"\n", b": \xff\n", b': {"tokens":["x"]}\n'])
def test_a_stream_with_unreadable_marks_goes_on_and_cannot_be_continued(mark: bytes) -> None:
    progress = Progress()
    progress.take(STREAM[0][0].encode() + STREAM[0][1])
    progress.on_forwarded(mark * 1000)
    assert progress.is_unrecoverable
    assert not progress.can_be_resumed
    assert progress.take(STREAM[1][0].encode() + STREAM[1][1]) == STREAM[1][1]


@pytest.mark.parametrize("unread", [False, True])
def test_events_of_vllm_that_are_not_json_go_on_and_are_not_kept(unread: bool) -> None:
    replay = Replay(VllmFacts)
    events = [b"data: {}\n\n", *([b"data: nonsense\n\n"] * 1000)]
    assert replay.take(events[0]) == events[0]
    if unread:
        replay.on_forwarded(b"".join(events[1:]))
    else:
        assert replay.take(b"".join(events[1:])) == b"".join(events[1:])
    assert len(replay._pending) <= 256
    assert replay.is_unrecoverable
