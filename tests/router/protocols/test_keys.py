"""Keys of KV through the router: those of clients, and hand-offs by keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.instance_facts import InstanceFacts, TicketKinds
from kvferry.router.body import RequestBody
from kvferry.router.instances.instance import NotProbed, VllmFacts
from kvferry.router.protocols.choose import can_pair, unpaired_by_keys_reason
from router.peers import CONCURRENT, DECODE, Peer, answer, failing, instances, routing, ticket
from router.request.test_hand_off import BODY, get, post

FIELDS = {"prefix_prompt_ids": [1, 2], "kvcache_store_keys": ["s"], "kvcache_load_keys": ["l"], "kvcache_ttl_s": 5}
KEEPS = {"keeps_keys": True, "connector": "KVStoreConnector", "kv_port": 0}
OWN_KEYS = ("kvcache_store_keys", "kvcache_load_keys", "kvcache_ttl_s", "kvcache_wait_s", "prefix_prompt_ids")


@pytest.mark.parametrize("at_top", [True, False])
def test_keys_of_clients_are_left_out_unless_they_are_accepted(at_top: bool) -> None:
    sent: dict[str, Any] = {"prompt": "x", **(FIELDS if at_top else {"kv_transfer_params": FIELDS})}
    data = json.dumps(sent).encode()
    assert json.loads(RequestBody.parse(data).encode()) == {"prompt": "x"}
    body = RequestBody.parse(data, takes_keys=True)
    assert json.loads(body.encode()) == {"prompt": "x", "kv_transfer_params": FIELDS}
    assert {name: json.loads(bytes(raw)) for name, raw in body.kv_keys.items()} == FIELDS
    trusted = RequestBody.parse(data, trust_tickets=True)
    assert trusted.encode() is data
    assert trusted.kv_keys == body.kv_keys


def test_tickets_do_not_pass_with_keys() -> None:
    params = {**FIELDS, "do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
    data = json.dumps({"prompt": "x", "kv_transfer_params": params, "ec_transfer_params": {"a": 1}}).encode()
    body = RequestBody.parse(data, takes_keys=True)
    assert json.loads(body.encode()) == {"prompt": "x", "kv_transfer_params": FIELDS}


def test_keys_that_are_given_twice_must_agree() -> None:
    sent = {"prompt": "x", "kvcache_store_keys": ["a"], "kv_transfer_params": {"kvcache_store_keys": ["b"]}}
    with pytest.raises(InvalidRequest, match="kvcache_store_keys is given twice"):
        RequestBody.parse(json.dumps(sent).encode(), takes_keys=True)
    assert not RequestBody.parse(b'{"kvcache_store_keys": null}', takes_keys=True).kv_keys


@pytest.mark.parametrize("takes_keys", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kvcache_wait_s", {}),
        ("kvcache_ttl_s", "5"),
        ("kvcache_store_keys", [5]),
        ("kvcache_load_keys", "key"),
        ("prefix_prompt_ids", [["a"]]),
    ],
)
def test_keys_of_a_wrong_type_are_refused_also_where_they_are_left_out(
    name: str, value: object, takes_keys: bool
) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        RequestBody.parse(json.dumps({"prompt": "x", name: value}).encode(), takes_keys=takes_keys)
    assert caught.value.param is not None
    assert caught.value.param.startswith(name)


class Pair:
    """One P and one D; each answers at once, and keeps what it was sent."""

    def __init__(self, facts: dict[str, Any] | None = None, prefill: Any = None) -> None:
        more = KEEPS if facts is None else facts
        self.prefill = Peer("prefill", prefill or self._prefill, facts={**CONCURRENT, **more})
        self.decode = Peer("decode", answer, facts={**DECODE, **more})

    async def _prefill(self, peer: Peer, request: Request, body: Any) -> Response:
        return JSONResponse({"choices": [{"text": "dropped"}], "usage": {"prompt_tokens": 9}})

    @asynccontextmanager
    async def routed(self, **settings: Any) -> Any:
        async with (
            instances(self.prefill, self.decode),
            routing([self.prefill.url], [self.decode.url], **settings) as (_, url),
        ):
            yield url


def keys_of(call: Any) -> dict[str, Any]:
    params = call.body.get("kv_transfer_params") or {}
    return {name: params[name] for name in OWN_KEYS if name in params}


async def test_p_stores_under_a_key_and_d_loads_by_it() -> None:
    pair = Pair()
    async with pair.routed(protocol="keys") as url:
        for _ in range(2):
            assert (await post(url, {**BODY, "cache_salt": "tenant"}))[0] == 200
        decisions = json.loads((await get(url, "/kvferry/decisions"))[1])
    names = set()
    for asked, decoded in zip(pair.prefill.calls, pair.decode.calls, strict=True):
        stored, loaded = keys_of(asked), keys_of(decoded)
        [name] = stored["kvcache_store_keys"]
        names.add(name)
        assert stored == {"kvcache_store_keys": [name], "kvcache_ttl_s": 600.0}
        assert loaded == {"kvcache_load_keys": [name], "kvcache_wait_s": 0.0}
        assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)
        assert asked.body["cache_salt"] == decoded.body["cache_salt"] == "tenant"
        assert "do_remote_decode" not in asked.body["kv_transfer_params"]
        assert "do_remote_prefill" not in decoded.body["kv_transfer_params"]
    assert len(names) == 2
    assert decisions


async def test_if_p_fails_d_gets_no_key() -> None:
    pair = Pair(prefill=failing(500))
    async with pair.routed(protocol="keys") as url:
        assert (await post(url, BODY))[0] == 200
    assert keys_of(pair.decode.calls[0]) == {}


async def test_p_may_be_given_keys_of_the_client_too() -> None:
    pair = Pair()
    async with pair.routed(protocol="keys", client_kv_keys=True) as url:
        assert (await post(url, {**BODY, "kvcache_load_keys": ["document"]}))[0] == 200
        assert (await post(url, {**BODY, "kvcache_store_keys": ["a", None], "kvcache_load_keys": ["b"]}))[0] == 200
        assert (await post(url, {**BODY, "kvcache_store_keys": [None]}))[0] == 200
    first, second, third = (keys_of(call) for call in pair.prefill.calls)
    [own] = first.pop("kvcache_store_keys")
    assert first == {"kvcache_load_keys": ["document"], "kvcache_ttl_s": 600.0}
    assert second == {"kvcache_store_keys": ["a", None], "kvcache_load_keys": ["b"]}
    assert len(third["kvcache_store_keys"][0]) > 8
    decoded = [keys_of(call) for call in pair.decode.calls]
    assert decoded[0] == {"kvcache_load_keys": [own], "kvcache_wait_s": 0.0}
    assert decoded[1] == {"kvcache_load_keys": ["a", None], "kvcache_wait_s": 0.0}


async def test_with_tickets_p_gets_the_clients_keys() -> None:
    pair = Pair(facts={}, prefill=ticket)
    async with pair.routed(client_kv_keys=True, hand_off="sequential") as url:
        assert (await post(url, {**BODY, **FIELDS}))[0] == 200
        assert (await post(url, {**BODY, "prompt_logprobs": 1, **FIELDS}))[0] == 200
    [asked] = pair.prefill.calls
    assert keys_of(asked) == FIELDS
    assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
    after, whole = pair.decode.calls
    assert keys_of(after) == {}
    assert keys_of(whole) == FIELDS


def pairs() -> Iterator[tuple[Any, Any, bool]]:
    keeps, does_not = (
        InstanceFacts(connector="KVStoreConnector", keeps_keys=True),
        InstanceFacts(connector="P2pConnector"),
    )
    yield keeps, keeps, True
    yield keeps, does_not, False
    yield does_not, does_not, False
    yield VllmFacts(), VllmFacts(), True
    yield keeps, VllmFacts(), False
    yield keeps, NotProbed(), True


@pytest.mark.parametrize(("prefill", "decode", "fits"), list(pairs()))
def test_pairs_by_keys(prefill: Any, decode: Any, fits: bool) -> None:
    assert (not unpaired_by_keys_reason(prefill, decode)) is fits
    assert (not unpaired_by_keys_reason(decode, prefill)) is fits


def test_instances_that_cannot_reach_each_other_pair_by_keys() -> None:
    writes, reads = TicketKinds(writes=("p2p over shm",)), TicketKinds(reads=("store",))
    p = InstanceFacts(connector="MultiConnector", keeps_keys=True, tickets=writes, role="prefill")
    d = InstanceFacts(connector="MultiConnector", keeps_keys=True, tickets=reads, role="decode")
    assert not can_pair(p, d)
    assert not unpaired_by_keys_reason(p, d)
    assert unpaired_by_keys_reason(d, p)
