"""What breaks while a request is under way ends in an answer or a named error, soon, and nothing stays behind."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.processes import Cluster, cluster
from support.waiting import until

pytestmark = pytest.mark.processes

PROMPT = list(range(7, 300))
LONG = [7 + number % 900 for number in range(3900)]
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False}
TRANSFER = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 3, "timeout_s": 5}}


@pytest.fixture
def started(model_maker: Any, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(model_maker("llama"), tmp_path, transfer=TRANSFER, ends_cleanly=False) as one:
        yield one


def prefilled(started: Cluster, **options: Any) -> dict[str, Any]:
    """P's answer with its ticket."""
    answer = started.prefill[0].complete(PROMPT, max_tokens=1, kv_transfer_params=PRODUCE, **options)
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    return answer["kv_transfer_params"]


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_p_dies_after_prefill_and_d_recomputes(started: Cluster) -> None:
    expected = tokens(started.decode[0].complete([*PROMPT[:-1], 9]))  # another prompt: nothing is cached for PROMPT
    ticket = prefilled(started)
    started.prefill[0].kill()
    begun = time.monotonic()
    answer = started.decode[0].complete(PROMPT, kv_transfer_params=ticket)
    assert time.monotonic() - begun < 10
    assert tokens(answer) == tokens(started.decode[0].complete(PROMPT))
    assert len(expected) == 12
    assert started.decode[0].metric("kvferry:kv_load_failures_total") == 1
    started.decode[0].require_clean()


def test_p_dies_after_prefill_and_the_policy_is_to_fail(model_maker: Any, tmp_path: Path) -> None:
    transfer = {**TRANSFER, "kv_load_failure_policy": "fail"}
    with cluster(model_maker("llama"), tmp_path, transfer=transfer, ends_cleanly=False) as started:
        ticket = prefilled(started)
        started.prefill[0].kill()
        body = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": ticket}
        response = started.decode[0].post("/v1/completions", body)
        assert response.status_code == 502 or "hand_off" in response.text
        assert "could not be loaded" in response.text
        started.decode[0].require_clean()


def test_p_is_dead_before_the_request_and_d_serves_alone(started: Cluster) -> None:
    expected = tokens(started.router.complete(PROMPT))
    started.prefill[0].kill()
    assert tokens(started.router.complete(PROMPT)) == expected
    started.decode[0].require_clean()


def test_d_dies_before_its_fetch_and_the_lease_ends(started: Cluster) -> None:
    prefilled(started)
    started.decode[0].kill()
    assert started.prefill[0].get("/kvferry/check").status_code == 200  # a lease is no leak
    until(lambda: started.prefill[0].metric("kvferry:num_hand_offs_held") == 0, timeout_s=8)
    started.prefill[0].require_clean()


def test_a_released_ticket_frees_at_once(started: Cluster) -> None:
    ticket = prefilled(started)
    assert started.prefill[0].metric("kvferry:num_hand_offs_held") == 1
    released = started.prefill[0].post("/kvferry/release", {"transfer_id": ticket["transfer_id"]})
    assert released.json() == {"released": True}
    until(lambda: started.prefill[0].metric("kvferry:num_hand_offs_held") == 0, timeout_s=2)
    answer = started.decode[0].complete(PROMPT, kv_transfer_params=ticket)  # too late: recomputed
    assert tokens(answer) == tokens(started.decode[0].complete(PROMPT))
    started.prefill[0].require_clean()
    started.decode[0].require_clean()


def test_a_ticket_is_good_for_one_fetch(started: Cluster) -> None:
    ticket = prefilled(started)
    both = [started.decode[0].complete(PROMPT, kv_transfer_params=ticket) for _ in range(2)]
    assert tokens(both[0]) == tokens(both[1])
    started.prefill[0].require_clean()
    started.decode[0].require_clean()


def test_p_stands_still_and_d_waits_for_it_once(started: Cluster) -> None:
    expected = tokens(started.router.complete(PROMPT))
    tickets = [prefilled(started, cache_salt=salt) for salt in "abc"]
    seconds = []
    started.prefill[0].kill(signal.SIGSTOP)
    for salt, ticket in zip("abc", tickets, strict=True):
        begun = time.monotonic()
        answer = started.decode[0].complete(PROMPT, kv_transfer_params=ticket, cache_salt=salt)
        seconds.append(time.monotonic() - begun)
        assert tokens(answer) == expected
    assert seconds[0] < 15  # of which D waits 5
    assert max(seconds[1:]) < 4  # of which D waits 1
    started.prefill[0].kill(signal.SIGCONT)
    num_taken = started.decode[0].metric("kvferry:connector_taken_total")
    ticket = prefilled(started, cache_salt="d")
    answer = started.decode[0].complete(PROMPT, kv_transfer_params=ticket, cache_salt="d")
    assert tokens(answer) == expected
    assert started.decode[0].metric("kvferry:connector_taken_total") == num_taken + 1
    started.prefill[0].require_clean()
    started.decode[0].require_clean()


def test_the_only_d_dies_in_the_middle_of_an_answer(started: Cluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 2}
    events = []
    with httpx.stream("POST", f"{started.router.url}/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            events.append(line)
            if len(events) == 20:
                started.decode[0].kill()
    assert any('"error"' in event for event in events[20:]), events[-4:]
    started.prefill[0].require_clean()


@pytest.fixture(scope="module", params=[pytest.param("sequential", marks=pytest.mark.full), "concurrent"])
def slow(
    request: pytest.FixtureRequest, model_maker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """For one request at a time, of which a long prompt takes a second or more."""
    engine = ("--max-num-batched-tokens=4", "--max-num-seqs=1")
    folder = tmp_path_factory.mktemp("slow")
    with cluster(
        model_maker("llama"), folder, transfer=TRANSFER, hand_off=request.param, engine=engine, ends_cleanly=False
    ) as one:
        yield one


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_the_client_leaves(when: str, slow: Cluster) -> None:
    prefill = slow.prefill[0]
    match when:
        case "queued":
            clients = [ask_and_stay(slow, LONG, when), ask_and_stay(slow, LONG[1:], when)]
            until(lambda: prefill.metric("vllm:num_requests_waiting") == 1, timeout_s=30)
        case "prefill":
            clients = [ask_and_stay(slow, LONG, when)]
            until(lambda: prefill.metric("vllm:num_requests_running") == 1, timeout_s=30)
        case _:
            clients = [ask_and_stay(slow, PROMPT, when, max_tokens=3000)]
            until(lambda: slow.decode[0].metric("vllm:num_requests_running") == 1, timeout_s=30)
    for client in clients:
        client.close()
    slow.require_clean()
    assert prefill.metric("kvferry:num_hand_offs_held") == 0
    assert slow.router.complete(PROMPT, cache_salt=when)["usage"]["completion_tokens"] == 12


def ask_and_stay(started: Cluster, prompt: list[int], salt: str, max_tokens: int = 150) -> socket.socket:
    """Ask for a long answer over a connection that the caller closes when it likes. Nothing of another salt is
    cached."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "cache_salt": salt}
    body = json.dumps(fields).encode()
    address = urlsplit(started.router.url)
    client = socket.create_connection((address.hostname, address.port), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: kvferry\r\nContent-Length: {len(body)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return client
