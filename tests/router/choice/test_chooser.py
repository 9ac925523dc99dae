"""What is concluded from the instances is found out again as soon as they say something new about themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry import router
from kvferry.core.clock import ManualClock
from kvferry.core.messages.instance_facts import InstanceFacts, KVSource
from kvferry.router.body import RequestBody
from kvferry.router.choice.chooser import Chooser
from kvferry.router.choice.policies.base import Choice, PromptTraits
from kvferry.router.choice.prompt import Prefix
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Facts, SglangFacts, VllmFacts
from kvferry.router.instances.pools import Pools

BODY_OF_MODEL = PromptTraits(model="m")


def parts(num: int = 2) -> tuple[Chooser, Pools]:
    """A router's choice, among so many instances of each role that have not been asked about themselves yet."""
    urls = [tuple(f"http://{role}{number}:1" for number in range(num)) for role in "pd"]
    config = RouterConfig(prefill_url=urls[0], decode_url=urls[1], policy="round_robin")
    pools = Pools.from_config(config)
    return Chooser(config, ManualClock(), pools), pools


def choose(chooser: Chooser, pools: Pools, asked: PromptTraits = BODY_OF_MODEL) -> Choice:
    return chooser.choose(asked, pools.prefill.alive(), pools.decode.alive())


def test_who_turns_out_to_be_another_engine_is_paired_no_more_and_again_when_it_is_back() -> None:
    chooser, pools = parts(1)
    (prefill,), (decode,) = pools.prefill.instances, pools.decode.instances
    assert choose(chooser, pools).prefill is prefill
    prefill.record_probe(VllmFacts())
    decode.record_probe(SglangFacts())
    assert not chooser.pairing.readers(prefill, [decode])
    assert (choose(chooser, pools).prefill, choose(chooser, pools).reason) == (None, "no_pair")
    decode.record_probe(VllmFacts())
    assert chooser.pairing.readers(prefill, [decode]) == [decode]
    assert choose(chooser, pools).prefill is prefill


def test_who_leaves_while_it_computes_is_read_by_its_like_only() -> None:
    chooser, pools = parts(1)
    (prefill,), (decode,) = pools.prefill.instances, pools.decode.instances
    for one in (prefill, decode):
        one.record_probe(SglangFacts())
    for pool in (pools.prefill, pools.decode):
        pool.add(f"http://new{pool.role}:1").record_probe(VllmFacts())
    for one in (prefill, decode):
        pools.retire(one)
    assert choose(chooser, pools).prefill in pools.prefill.instances
    assert not chooser.pairing.readers(prefill, pools.decode.instances)
    assert chooser.choose(BODY_OF_MODEL, [prefill], pools.decode.instances).prefill is None


def test_each_goes_only_to_whom_can_read_it_when_engines_are_mixed() -> None:
    chooser, pools = parts(2)
    kinds: list[Facts] = [VllmFacts(), SglangFacts()]
    for pool in (pools.prefill, pools.decode):
        for one, facts in zip(pool.instances, kinds, strict=True):
            one.record_probe(facts)
    for _ in range(8):
        choice = choose(chooser, pools)
        assert type(choice.prefill.facts) is type(choice.decode.facts)
    pools.retire(pools.decode.instances[1])
    assert {choose(chooser, pools).prefill for _ in range(4)} == {pools.prefill.instances[0]}


@pytest.mark.parametrize("learned_first", [False, True])
def test_who_has_the_model_is_chosen_and_anyone_if_nobody_says_so(learned_first: bool) -> None:
    chooser, pools = parts(2)
    if not learned_first:
        choose(chooser, pools)
    first, second = pools.decode.instances
    first.record_probe(InstanceFacts(model_names=["m"]))
    second.record_probe(InstanceFacts(model_names=["other"]))
    assert {choose(chooser, pools).decode for _ in range(4)} == {first}
    assert {choose(chooser, pools, PromptTraits(model="unheard of")).decode for _ in range(4)} == {first, second}
    added = pools.decode.add("http://d9:1")
    added.record_probe(InstanceFacts(model_names=["m"]))
    assert {choose(chooser, pools).decode for _ in range(4)} == {first, added}


def test_who_is_asked_again_and_says_the_same_or_fails_again_changes_nothing() -> None:
    pools = parts(1)[1]
    (prefill,) = pools.prefill.instances
    before = pools.revision
    prefill.mark_down("it is off")
    prefill.mark_down("it is off")
    assert pools.revision == before
    for _ in range(3):
        facts = InstanceFacts(engine_id="one", model_names=["m"])
        prefill.record_probe(facts)
        assert prefill.facts is facts, "by which it is known that it was asked again"
    assert pools.revision == before + 1
    prefill.invalidate()
    assert (pools.revision, prefill.model_names) == (before + 1, ["m"]), "it is the same until it says otherwise"


def test_the_same_ticket_origin_again_is_nothing_new() -> None:
    pools = parts(1)[1]
    (prefill,) = pools.prefill.instances
    sources = [KVSource(engine_id=name, host="h", port=1) for name in "ab"]
    prefill.record_probe(VllmFacts().with_source(sources[0]).with_source(sources[1]))
    before = pools.revision
    for source in sources * 3:
        prefill.replace_facts(prefill.facts.with_source(source))
    assert pools.revision == before
    prefill.replace_facts(prefill.facts.with_source(KVSource(engine_id="c", host="h", port=1)))
    assert [one.engine_id for one in prefill.facts.sources] == ["c", "b"]
    assert pools.revision > before


def test_a_new_process_at_an_address_has_an_empty_cache() -> None:
    chooser, pools = parts(1)
    (decode,) = pools.decode.instances
    decode.record_probe(InstanceFacts(engine_id="one"))
    asked = PromptTraits(model="m", prefix=Prefix((1, 2), (100, 200)))
    choose(chooser, pools, asked)
    assert chooser.index.match(asked.prefix)[decode] == 200
    decode.invalidate()
    decode.record_probe(InstanceFacts(engine_id="one"))
    choose(chooser, pools, PromptTraits(model="m"))
    assert chooser.index.match(asked.prefix)[decode] == 200, "it was only asked again"
    decode.record_probe(InstanceFacts(engine_id="two"))
    choose(chooser, pools, PromptTraits(model="m"))
    assert decode not in chooser.index.match(asked.prefix)


def test_decisions_name_no_cache_of_who_leaves_or_has_left() -> None:
    chooser, pools = parts(2)
    leaving, staying = pools.decode.instances
    asked = PromptTraits(model="m", prefix=Prefix((1, 2), (100, 200)))
    for one in (leaving, staying):
        chooser.index.record_sent(one, asked.prefix)
    pools.retire(leaving)
    assert chooser.record("/v1/completions", asked, b"r", 0.0).cached_tokens() == {staying.name: 200}
    pools.forget(leaving)  # before the index is told of it
    assert chooser.record("/v1/completions", asked, b"r", 0.0).cached_tokens() == {staying.name: 200}


def test_facts_are_learned_and_never_set_behind_the_routers_back() -> None:
    """What follows from them would not be found out again."""
    source = Path(router.__file__).parent
    writers = [one.name for one in source.rglob("*.py") if re.search(r"\.facts(, [\w.]+)*(: \w+)? = ", one.read_text())]
    assert writers == ["instance.py"]


async def test_a_policy_that_raises_costs_no_request_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    chooser, pools = parts(2)

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("boom")

    chooser.policy.choose = chooser.policy.on_choice_used = fail  # type: ignore[assignment,method-assign]
    asked = PromptTraits(model="m")
    for _ in range(2):
        assert chooser.choose(asked, pools.prefill.instances, pools.decode.instances).decode in pools.decode.instances
    assert caplog.text.count("failed; the least loaded instances are chosen") == 1


def test_prefill_instances_answer_only_where_all_are_kvferrys_and_end_an_answer_alike() -> None:
    chooser, pools = parts(1)

    def may_answer() -> bool:
        options = chooser.pairing.options("m", pools.prefill.alive(), pools.decode.alive(), may_aggregate=True)
        return options.decode_max_num_seqs > 0

    (prefill,), (decode,) = pools.prefill.instances, pools.decode.instances
    ours = InstanceFacts(
        engine_id="e", connector="P2pConnector", layout="same", max_model_len=64, max_num_seqs=8, model_names=["m"]
    )
    assert not may_answer(), "nothing is known of them yet"
    for one in (prefill, decode):
        one.record_probe(ours)
    assert may_answer()
    prefill.record_probe(msgspec.structs.replace(ours, max_model_len=32))
    assert not may_answer()
    for one in (prefill, decode):
        one.record_probe(VllmFacts(model_names=["m"]))
    assert not may_answer()


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({}, False),
        ({"response_format": None, "structured_outputs": None}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
    ],
)
def test_structured_output_is_for_instances_that_can_constrain(fields: dict[str, Any], is_constrained: bool) -> None:
    config = RouterConfig(
        prefill_url=("http://p0:1", "http://p1:1"), decode_url=("http://d0:1", "http://d1:1"), policy="round_robin"
    )
    pools = Pools.from_config(config)
    chooser = Chooser(config, ManualClock(), pools)
    prefills, decodes = pools.prefill.instances, pools.decode.instances
    for number, instance in enumerate((*prefills, *decodes)):
        instance.record_probe(
            InstanceFacts(engine_id=str(number), model_names=["m"], structured_outputs=number % 2 == 1)
        )
    traits = chooser.read("/v1/completions", RequestBody.parse(msgspec.json.encode({"prompt": "a", **fields})), {})
    assert traits.is_constrained == is_constrained
    chooser.pairing.refresh()
    choices = [chooser.choose(traits, prefills, decodes) for _ in range(4)]
    assert {choice.decode for choice in choices} == ({decodes[1]} if is_constrained else set(decodes))
    if is_constrained:
        assert {choice.prefill for choice in choices} <= {prefills[1], None}
        alone = chooser.choose(traits, prefills[:1], decodes)
        assert (alone.prefill, alone.decode) == (None, decodes[1])  # served aggregated
        assert chooser.choose(traits, (), decodes[:1]).decode is decodes[0]  # it gives the best error
