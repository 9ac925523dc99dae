"""Who can hand off to whom: pairs that could not read each other's KV are never formed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.messages.instance_facts import InstanceFacts, TicketKinds
from kvferry.router.instances.instance import Facts, NotProbed, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.protocols.choose import can_pair
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, routing, ticket
from router.request.test_hand_off import BODY, get, post


def layout(dtype: str = "float32", block_size: int = 16, num_layers: int = 2) -> KVLayout:
    layers = tuple(LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8) for _ in range(num_layers))
    return KVLayout(model_fingerprint="m", dtype=dtype, block_size=block_size, layers=layers)


def facts(of: KVLayout) -> dict[str, Any]:
    """As an instance tells them."""
    return {"layout": of.fingerprint(), "kv_layout": json.loads(msgspec.json.encode(of))}


def known(of: KVLayout) -> InstanceFacts:
    return InstanceFacts(connector="P2pConnector", layout=of.fingerprint(), kv_layout=of)


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        (known(layout()), known(layout()), True),
        (known(layout()), known(layout(block_size=64)), True),
        (known(layout()), known(layout(block_size=24)), False),
        (known(layout()), known(layout("bfloat16")), False),
        (known(layout()), known(layout(num_layers=3)), False),
        (known(layout()), InstanceFacts(connector="P2pConnector", layout="without its parts"), True),
        (known(layout()), InstanceFacts(layout=layout().fingerprint()), False),
        (known(layout()), VllmFacts(), False),
        (known(layout()), NotProbed(), True),
        (VllmFacts(), UnknownFacts(), True),
        (VllmFacts(cache_dtype="auto"), VllmFacts(cache_dtype="fp8"), False),
        (VllmFacts(cache_dtype="auto"), VllmFacts(), True),
        (VllmFacts(model_names=["a", "b"]), VllmFacts(model_names=["b"]), True),
        (VllmFacts(model_names=["a"]), VllmFacts(model_names=["b"]), False),
    ],
)
def test_pairs(prefill: Any, decode: Any, fits: bool) -> None:
    assert can_pair(prefill, decode) is fits
    assert can_pair(decode, prefill) is fits


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        ("prefill", "decode", True),
        ("both", "both", True),
        ("decode", "prefill", False),
        ("prefill", "prefill", False),
        ("decode", "decode", False),
    ],
)
@pytest.mark.parametrize("kind", ["kvferry", "sglang"])
def test_roles_for_which_instances_were_started(prefill: str, decode: str, fits: bool, kind: str) -> None:
    """Their URLs may have been confused."""

    def facts_of(role: str) -> Facts:
        mode = "null" if role == "both" else role
        return InstanceFacts(role=role, connector="P2pConnector") if kind == "kvferry" else SglangFacts(mode=mode)

    assert can_pair(facts_of(prefill), facts_of(decode)) is fits


P2P, STORE, BOTH, NONE = ("p2p",), ("store",), ("p2p", "store"), ()


@pytest.mark.parametrize(
    ("writes", "reads", "fits"),
    [
        (P2P, P2P, True),
        (P2P, STORE, False),
        (STORE, P2P, False),
        (STORE, BOTH, True),
        (P2P, NONE, False),
        (NONE, BOTH, False),
        (None, STORE, True),
        (P2P, None, True),
        (None, NONE, False),
        (NONE, None, False),
    ],
)
def test_who_reads_the_tickets_that_the_other_writes(writes: Any, reads: Any, fits: bool) -> None:
    """None: an older instance, or a connector of another package, which may well."""
    prefill = InstanceFacts(connector="a", tickets=TicketKinds(writes=writes, reads=("never asked",)))
    decode = InstanceFacts(connector="b", tickets=TicketKinds(writes=("never asked",), reads=reads))
    assert can_pair(prefill, decode) is fits


async def test_each_prefill_hands_off_to_the_decode_that_reads_its_tickets(caplog: pytest.LogCaptureFixture) -> None:
    """And it is said once that others are not paired."""

    def kinds(facts: dict[str, Any], kind: str) -> dict[str, Any]:
        told = {"connector": f"{kind}-connector", "engine_id": f"{facts['role']}-{kind}", "kv_port": 0}
        return facts | told | {"tickets": {"writes": [kind], "reads": [kind]}}

    prefills = [Peer("prefill", ticket, facts=kinds(CONCURRENT, kind)) for kind in ("one", "other")]
    decodes = [Peer("decode", answer, facts=kinds(DECODE, kind)) for kind in ("one", "other")]
    async with instances(*prefills, *decodes):
        async with routing([one.url for one in prefills], [one.url for one in decodes]) as (_, url):
            for number in range(12):
                assert (await post(url, {**BODY, "prompt": f"{number}"}))[0] == 200
    for p, d in zip(prefills, decodes, strict=True):
        asked = [call.body["kv_transfer_params"]["transfer_id"] for call in p.calls]
        assert asked == [call.body["kv_transfer_params"]["transfer_id"] for call in d.calls]
    assert sum(len(one.calls) for one in prefills) == 12
    told = "one-connector at prefill writes tickets of kind one, and other-connector at decode reads other"
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize("policy", ["cost", "round_robin", "session", "power_of_two"])
async def test_each_prefill_hands_off_to_the_decode_that_can_read_its_kv(policy: str) -> None:
    layouts = [layout(), layout("bfloat16")]
    prefills = [Peer("prefill", ticket, facts=CONCURRENT | facts(one) | {"kv_port": 0}) for one in layouts]
    decodes = [Peer("decode", answer, facts=DECODE | facts(one)) for one in layouts]
    async with instances(*prefills, *decodes):
        urls = [one.url for one in prefills], [one.url for one in decodes]
        async with routing(*urls, policy=policy) as (_, url):
            for number in range(12):
                assert (await post(url, {**BODY, "prompt": f"{number} {policy}"}))[0] == 200
    for p, d in zip(prefills, decodes, strict=True):
        asked = [call.body["kv_transfer_params"]["transfer_id"] for call in p.calls]
        assert asked == [call.body["kv_transfer_params"]["transfer_id"] for call in d.calls]
    assert sum(len(one.calls) for one in prefills) == 12


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "told"),
    [
        (facts(layout("bfloat16")), facts(layout()), ""),
        ({"role": "decode"}, {"role": "prefill"}, "prefill-0 .* takes no part in hand-offs: it was started for decode"),
        ({"role": "both", "connector": None}, {}, "prefill-0 .* takes no part in hand-offs: it has no connector"),
        ({}, {"role": "both", "connector": None}, "decode-0 .* takes no part in hand-offs: it has no connector"),
        (
            {"connector": "Mine", "tickets": {"writes": [], "reads": []}},
            {},
            "prefill-0 .* takes no part in hand-offs: its Mine writes no tickets",
        ),
        ({"tickets": {"writes": ["a"]}}, {"tickets": {"reads": ["b"]}}, "not paired: .* of kind a, .* reads b"),
    ],
)
async def test_where_no_pair_can_be_formed_decode_does_both(
    of_prefill: dict[str, Any], of_decode: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    p = Peer("prefill", ticket, facts=CONCURRENT | of_prefill)
    d = Peer("decode", answer, facts=DECODE | of_decode)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        assert (await post(url))[0] == 200
        metrics = (await get(url, "/metrics"))[1]
    assert not p.calls
    assert d.calls[0].body == BODY
    assert 'hand_offs_total{kind="whole",reason="no_pair"} 1.0' in metrics
    assert re.search(told, caplog.text)


@pytest.mark.parametrize("kind", ["layouts", "roles"])
async def test_an_idle_instance_says_why_for_as_long_as_it_is_and_works_once_its_pair_fits(kind: str) -> None:
    wrong, reason = {
        "layouts": (facts(layout("bfloat16")), "dtype"),
        "roles": ({"role": "prefill"}, "the decode instance was started for prefill"),
    }[kind]
    p = Peer("prefill", ticket, facts=CONCURRENT | facts(layout()), names_itself=True)
    d = Peer("decode", answer, facts=DECODE | facts(layout()) | wrong, names_itself=True)
    async with instances(p, d), routing([p.url], [d.url], health_interval_s=0.05) as (_, url):
        for _ in range(3):
            assert (await post(url))[0] == 200
            shown = json.loads((await get(url, "/kvferry/instances"))[1])["instances"]
            assert [reason in one["no_hand_off"] for one in shown] == [True, True]
        assert not p.calls
        d.facts = DECODE | facts(layout()) | {"engine_id": "its successor"}
        async with asyncio.timeout(10):
            while any(one["no_hand_off"] for one in json.loads((await get(url, "/kvferry/instances"))[1])["instances"]):
                await d.looked_at.get()
        assert (await post(url))[0] == 200
    assert len(p.calls) == 1


async def test_a_model_goes_to_the_instances_that_serve_it() -> None:
    decodes = [Peer("decode", answer, facts=DECODE | {"model_names": [name]}) for name in ("a", "b")]
    async with instances(*decodes), routing([], [one.url for one in decodes]) as (_, url):
        for name in "aabbb":
            assert (await post(url, {**BODY, "model": name}))[0] == 200
        assert (await post(url, {**BODY, "model": "unknown"}))[0] == 200
    names = [[call.body["model"] for call in one.calls] for one in decodes]
    assert [[one for one in found if one != "unknown"] for found in names] == [["a", "a"], ["b", "b", "b"]]


async def test_vllm_says_the_size_and_type_of_its_cache_in_its_metrics() -> None:
    async def metrics(peer: Peer) -> str:
        return 'vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="0",num_gpu_blocks="100"} 1.0\n'

    d = Peer("decode", answer, vllm="0.32", metrics=metrics)
    async with instances(d), routing([], [d.url]) as (router, _):
        (one,) = router.services.pools.decode.instances
        assert isinstance(one.facts, VllmFacts)
        assert (one.facts.num_kv_tokens, one.facts.cache_dtype) == (1600, "fp8")


async def test_a_size_that_no_cache_has_is_not_believed() -> None:
    async def metrics(peer: Peer) -> str:
        return f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1.0\n'

    d = Peer("decode", answer, vllm="0.32", metrics=metrics)
    async with instances(d), routing([], [d.url]) as (router, _):
        (one,) = router.services.pools.decode.instances
        assert isinstance(one.facts, VllmFacts)
        assert one.facts.num_kv_tokens == 0
