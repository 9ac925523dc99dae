"""Who has which beginnings of prompts: from history, from events, within bounds."""

from __future__ import annotations

import random

import pytest

from kvferry.core.errors import LeakError
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import Prefix, text_prefix
from kvferry.router.instances.load import Candidates
from kvferry.testing.policy import instances


def blocks(*keys: int, size: int = 100) -> Prefix:
    return Prefix(keys, [size * (place + 1) for place in range(len(keys))])


def tokens(*ids: int) -> Prefix:
    return Prefix((), (), ids)


def test_what_was_served_is_found_as_far_as_prompts_begin_alike() -> None:
    index = PrefixIndex()
    index.record_sent("a", blocks(1, 2, 3))
    index.record_sent("b", blocks(1, 7))
    assert index.match(blocks(1, 2, 4)) == {"a": 200, "b": 100}
    assert index.match(blocks(9)) == {}
    index.check()


def test_halves_that_disagree_are_told_of_whatever_python_makes_of_asserts() -> None:
    index = PrefixIndex()
    index.record_sent("a", blocks(1, 2))
    index._holders[7] = 1
    with pytest.raises(LeakError, match="3 prefixes have holders, which have 2"):
        index.check()
    del index._holders[7]
    index._caches["a"].num_tokens += 50
    with pytest.raises(LeakError, match="250 tokens are counted, 200 are held"):
        index.check()


def test_within_an_instances_capacity_the_oldest_goes_and_of_a_prompt_its_end() -> None:
    index = PrefixIndex()
    index.set_capacity("a", 400)
    index.record_sent("a", blocks(1, 2, 3))
    index.record_sent("a", blocks(11, 12, 13))
    assert index.match(blocks(1, 2, 3)) == {"a": 100}
    assert index.match(blocks(11, 12, 13)) == {"a": 300}
    index.record_sent("a", blocks(1))
    index.record_sent("a", blocks(21))
    assert index.match(blocks(1)) == {"a": 100}
    index.check()


def test_all_instances_together_are_bounded() -> None:
    index, rng = PrefixIndex(max_entries=100), random.Random(1)
    for number in range(2000):
        index.record_sent(rng.choice("abcd"), blocks(*range(number * 10, number * 10 + 7)))
        assert index.statistics().num_entries <= 100
    index.check()
    for one in "abcd":
        index.forget(one)
    assert index.statistics().num_entries == index.statistics().num_keys == 0


def test_events_tell_of_blocks_by_tokens_under_the_instances_own_names() -> None:
    index = PrefixIndex()
    assert not index.wants_token_ids
    index.record_stored("a", [b"x", b"y"], None, [1, 2, 3, 4], 2)
    index.record_stored("a", [b"z"], b"y", [5, 6], 2)
    assert index.wants_token_ids
    assert index.match(tokens(1, 2, 3, 4, 5, 6, 7)) == {"a": 6}
    assert index.match(tokens(1, 2, 3, 9)) == {"a": 2}
    index.removed("a", [b"y", b"unheard of"])
    assert index.match(tokens(1, 2, 3, 4, 5, 6)) == {"a": 2}
    index.cleared("a")
    assert index.match(tokens(1, 2)) == {}
    index.check()


def test_a_block_whose_parent_is_unknown_is_passed_over() -> None:
    index = PrefixIndex()
    index.record_stored("a", [b"z"], b"never heard of", [5, 6], 2)
    assert index.match(tokens(5, 6)) == {}
    index.record_stored("a", [b"z"], None, [5, 6], 0)
    index.record_sent("a", tokens(5, 6, 7, 8))
    assert index.match(tokens(5, 6, 7, 8)) == {"a": 4}, "its first event was lost, but it is one that tells"
    index.check()


def test_where_events_come_what_was_just_sent_is_known_before_they_do() -> None:
    index = PrefixIndex()
    index.record_stored("a", [b"x"], None, [1, 2], 2)
    index.record_sent("a", tokens(1, 2, 3, 4, 5))
    assert index.match(tokens(1, 2, 3, 4)) == {"a": 4}
    index.record_stored("a", [b"y"], b"x", [3, 4], 2)
    index.removed("a", [b"y"])
    assert index.match(tokens(1, 2, 3, 4)) == {"a": 2}
    index.check()


def test_random_traffic_keeps_both_halves_in_step() -> None:
    index, rng = PrefixIndex(max_entries=300), random.Random(2)
    for _ in range(3000):
        one, ids = rng.choice("abc"), [rng.randrange(3) for _ in range(8)]
        match rng.randrange(5):
            case 0:
                index.record_stored(one, [tuple(ids[:2]), tuple(ids[:4])], None, ids[:4], 2)
            case 1:
                index.removed(one, [tuple(ids[:2])])
            case 2 if rng.random() < 0.02:
                index.forget(one)
            case _:
                index.record_sent(one, tokens(*ids))
    index.check()


def test_the_vector_says_of_each_instance_what_the_match_says() -> None:
    index, rng, everyone = PrefixIndex(max_entries=5000), random.Random(3), instances("decode", 40)
    group = Candidates(everyone)
    for number in range(400):
        index.record_sent(rng.choice(everyone), blocks(*range(rng.randrange(1, 8))))
        if number % 7 == 0:
            index.record_stored(rng.choice(everyone), [(1,), (2,), (3,)], None, [1, 1, 2, 2, 3, 3], 2)
        if number % 20 == 0:
            index.forget(rng.choice(everyone))
        keys = range(rng.randrange(8))
        ends = [100.0 * (key + 1) for key in keys]
        prefix = Prefix(keys, ends, [1, 1, 2, 2, rng.randrange(5), 3] if rng.random() < 0.5 else None)
        match = index.match(prefix)
        assert index.cached(prefix, group).tolist() == [match.get(one, 0) for one in everyone]
        assert all(match.values())
    index.check()


def test_texts_share_names_as_far_as_they_begin_alike_and_no_further() -> None:
    first, second = b"[" + b"a" * 5000, b"[" + b"a" * 3000 + b"b" * 5000
    a, b = text_prefix(first, b"m", 0.25), text_prefix(second, b"m", 0.25)
    shared = [one for one, other in zip(a.keys, b.keys, strict=False) if one == other]
    assert shared == list(a.keys[: len(shared)])
    assert 600 <= a.ends[len(shared) - 1] <= 3001 / 4
    other_model = text_prefix(first, b"n", 0.25)
    assert not set(a.keys) & set(other_model.keys)


def test_a_very_long_text_has_few_names() -> None:
    prefix = text_prefix(b"x" * 32 * 2**20, b"", 0.25)
    assert len(prefix.keys) < 5000
    assert text_prefix(b"short", b"", 0.25).keys == []


def test_block_sizes_are_those_of_the_instances_that_are_here() -> None:
    index = PrefixIndex()
    for size in (1, 2, 4):
        index.record_stored("a", ["x"], None, [1, 2, 3, 4], size)
    assert index.wants_token_ids
    assert index.match(tokens(1, 2, 3, 4)) == {"a": 4}
    index.forget("a")
    assert not index.wants_token_ids
