"""From engine outputs to deltas: text, offsets, what ends a choice."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput
from kvferry.engine.server.assembly import ChoiceAssembler, Delta, TextOptions, merge_deltas

Ids = Any


@pytest.fixture
def ids(backend: Any) -> Ids:
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def output(token_ids: list[int], **fields: Any) -> EngineOutput:
    return EngineOutput(request_id="r", token_ids=token_ids, **fields)


def run(assembler: ChoiceAssembler, outputs: list[EngineOutput]) -> Delta:
    deltas = []
    for one in outputs:
        deltas.append(assembler.feed(one))
        if deltas[-1].finish_reason is not None:
            break
    return merge_deltas(deltas)


def one_by_one(token_ids: list[int], reason: Any = "length") -> list[EngineOutput]:
    return [output([one]) for one in token_ids[:-1]] + [output(token_ids[-1:], finish_reason=reason)]


def test_text_and_offsets(backend: Any, ids: Ids) -> None:
    token_ids = ids("naïve 🎉 fox")
    whole = run(ChoiceAssembler(3, backend, [], TextOptions()), one_by_one(token_ids))
    assert (whole.index, whole.text, whole.finish_reason, whole.first) == (3, "naïve 🎉 fox", "length", True)
    assert whole.token_ids == token_ids
    assert whole.offsets == sorted(whole.offsets)
    assert whole.text[whole.offsets[-1] :].strip() in "fox"


def test_several_tokens_at_once_are_as_good_as_one_by_one(backend: Any, ids: Ids) -> None:
    token_ids = ids("the quick brown fox, naïvely")
    assembler = ChoiceAssembler(0, backend, [], TextOptions(stops=("brown",)))
    once = assembler.feed(output(token_ids, finish_reason="length"))
    assert once == run(ChoiceAssembler(0, backend, [], TextOptions(stops=("brown",))), one_by_one(token_ids))
    assert (once.text, once.finish_reason, once.stop_reason) == ("the quick ", "stop", "brown")
    assert len(once.token_ids) < len(token_ids)


def test_the_token_that_stops_is_counted_and_not_shown(backend: Any, ids: Ids) -> None:
    end = backend.token_to_id("<|end|>")
    outputs = [output(ids("fox")), output([end], finish_reason="stop")]
    shown = TextOptions(skip_special_tokens=False)
    assert run(ChoiceAssembler(0, backend, [], shown), outputs).text == "fox"
    assert run(ChoiceAssembler(0, backend, [], shown), outputs).token_ids[-1] == end
    shown = TextOptions(skip_special_tokens=False, include_stop=True)
    assert run(ChoiceAssembler(0, backend, [], shown), outputs).text == "fox<|end|>"


def test_held_back_text_comes_at_the_end(backend: Any, ids: Ids) -> None:
    assembler = ChoiceAssembler(0, backend, [], TextOptions(stops=("fox!",)))
    outputs = [output([one]) for one in ids("the fox")]
    assert "".join(assembler.feed(one).text for one in outputs) == "the "
    assert assembler.feed(output([], finish_reason="length")).text == "fox"


def test_a_stop_string_before_min_tokens_is_text(backend: Any, ids: Ids) -> None:
    token_ids = ids("a dog, a dog, a dog")
    number = len(ids("a dog, a"))
    options = TextOptions(stops=("dog",), min_tokens=number)
    assert run(ChoiceAssembler(0, backend, [], options), one_by_one(token_ids)).text == "a dog, a "


def test_a_broken_character_at_the_end(backend: Any, ids: Ids) -> None:
    whole = run(ChoiceAssembler(0, backend, [], TextOptions()), one_by_one(ids("x🎉")[:-1]))
    assert whole.text == "x�"


def test_logprobs_stay_with_their_tokens(backend: Any, ids: Ids) -> None:
    token_ids = ids("the fox jumps over")
    places = [TokenLogprobs(one, -0.5, 1) for one in token_ids]
    assembler = ChoiceAssembler(0, backend, [], TextOptions(stops=("fox",)))
    delta = assembler.feed(output(token_ids, logprobs=places))
    assert [place.token_id for place in delta.logprobs] == delta.token_ids
    assert delta.finish_reason == "stop"
