"""kvferry's P2P connector between real vLLM servers, behind the router: exact, and nothing stays behind.

The last tests end the servers one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from support.processes import KvferryProcess
from support.vllm_servers import (
    Reference,
    Server,
    answers,
    body_of,
    figure,
    hold_open,
    kill,
    num_received,
    prefilled,
    prompts,
    require_nothing_kept,
    router_before,
    vllm_servers,
    within,
)
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

LEASE_S, TIMEOUT_S = 8, 6
METRIC = "vllm:kvferry_p2p_connector"


def p2p(transport: str) -> dict[str, Any]:
    extra = {"transport": transport, "lease_s": LEASE_S, "timeout_s": TIMEOUT_S}
    return {"kv_connector": "P2pConnector", "kv_connector_extra_config": extra}


@dataclass
class Started:
    """One P, and two D that fetch from it in different ways, each behind a router of its own: "shm" asks P early,
    "tcp" when P has answered."""

    prefill: KvferryProcess
    decodes: dict[str, KvferryProcess]
    routers: dict[str, KvferryProcess]

    def require_nothing_kept(self) -> None:
        require_nothing_kept(self.prefill, *self.decodes.values())
        assert self.num_held == 0

    @property
    def num_held(self) -> float:
        """Hand-offs that P keeps."""
        return self.prefill.metric(METRIC + "_num_produced")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("p2p")
    wanted = {
        "prefill": Server("prefill", p2p("auto")),
        "shm": Server("decode", p2p("shm")),
        "tcp": Server("decode", p2p("tcp"), ("--no-enable-prefix-caching",)),
    }
    with vllm_servers(folder, **wanted) as servers:
        decodes = {name: servers[name] for name in ("shm", "tcp")}
        with (
            router_before(folder, servers["prefill"], servers["shm"], "--hand-off=concurrent") as shm,
            router_before(folder, servers["prefill"], servers["tcp"]) as tcp,
        ):
            yield Started(servers["prefill"], decodes, {"shm": shm, "tcp": tcp})


def test_what_kvferry_logs_is_in_vllms_log(started: Started) -> None:
    """As a line of vLLM's: the process, the level, the time."""
    assert re.search(r"\(Worker pid=\d+\) INFO \S+ \S+ \[\S+\] P2pConnector: \d+ blocks of", started.prefill.log)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tokens_are_those_of_one_server_and_the_kv_came(transport: str, started: Started, reference: Reference) -> None:
    decode = started.decodes[transport]
    before, fetched = num_received(decode), decode.metric(METRIC + "_fetches_total")
    assert answers(started.routers[transport].url, reference.prompts) == reference.tokens
    # D with "tcp" has no prefix cache, so all came; vLLM may count a prompt's last token as computed here.
    most = reference.num_prompt_tokens
    least = most - len(reference.prompts) if transport == "tcp" else most / 2
    until(lambda: least <= num_received(decode) - before <= most, 10, figures(decode))
    assert decode.metric(METRIC + "_fetches_total") - fetched == len(reference.prompts)
    assert decode.metric(METRIC + "_taken_bytes_total", kind=transport) > 0
    # Where D may ask early, the router knows P's address from its first tickets on.
    router, num = started.routers[transport], len(reference.prompts)
    early = router.metric("kvferry_router_hand_offs_total", kind="concurrent")
    assert (0.7 * num < early < num) if transport == "shm" else early == 0
    started.require_nothing_kept()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_at_once_that_share_prefixes(transport: str, started: Started, shared_reference: Reference) -> None:
    found = answers(started.routers[transport].url, shared_reference.prompts, at_once=24)
    pairs = zip(found, shared_reference.tokens, strict=True)
    wrong = [f"{index}: {a} {b}" for index, (a, b) in enumerate(pairs) if a != b]
    assert not wrong
    started.require_nothing_kept()


def figures(server: KvferryProcess) -> str:
    """The connector's."""
    lines = server.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith((METRIC, "vllm:prompt_tokens_by_source")))


def test_usage_is_that_of_one_server(started: Started) -> None:
    """Cached tokens are those that P did not have to compute; none, where D was called before P knew."""
    body = body_of(prompts(20, 300, seed=2)[8], stream=True, stream_options={"include_usage": True})
    first, second = (last_usage(started.routers["tcp"].url, body) for _ in range(2))
    assert (first["prompt_tokens"], first["completion_tokens"], first["total_tokens"]) == (300, 8, 308)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 288
    third = last_usage(started.routers["shm"].url, body)
    assert (third["total_tokens"], third["prompt_tokens_details"]["cached_tokens"]) == (308, 0)


def last_usage(url: str, body: dict[str, Any]) -> dict[str, Any]:
    text = httpx.post(url + "/v1/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = events[-1]["usage"]
    return found


def test_a_seed_draws_what_one_server_draws(started: Started) -> None:
    """D draws the first token itself, with the client's seed or with none."""
    (prompt,) = prompts(10, 200, seed=3)[8:9]
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    alone = answers(started.decodes["tcp"].url, [prompt], **options)
    assert answers(started.routers["tcp"].url, [prompt], **options) == alone


def test_chat_and_choices(started: Started) -> None:
    url = started.routers["shm"].url
    chat = {"model": "m", "messages": [{"role": "user", "content": "def add(a, b):"}], "max_completion_tokens": 4}
    answer = httpx.post(url + "/v1/chat/completions", json=chat, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4
    several = httpx.post(url + "/v1/completions", json=body_of([7] * 50, n=3, temperature=1.0), timeout=60).json()
    assert [len(choice["token_ids"]) for choice in several["choices"]] == [8, 8, 8]
    asked = figure(url, "kvferry_router_hand_offs_total", kind="whole", reason="several_choices")
    assert asked == 1


# Clients that leave.


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_clients_that_leave(phase: str, started: Started) -> None:
    router = started.routers["shm"]
    asked = [body_of(prompt, max_tokens=1500, stream=True) for prompt in long_prompts(8)]
    with hold_open(router.url, asked):
        until(lambda: router.metric("kvferry_router_instance_in_flight", role=phase) >= 3, timeout_s=60)
    started.require_nothing_kept()
    assert router.metric("kvferry_router_instance_in_flight") == 0


def long_prompts(count: int) -> list[list[int]]:
    """No two begin alike."""
    return [[(7 * number + place * (number + 3)) % 3900 + 5 for place in range(2500)] for number in range(count)]


def test_a_client_that_leaves_in_the_middle_of_its_answer(started: Started) -> None:
    router = started.routers["tcp"]
    body = body_of(long_prompts(1)[0], max_tokens=1400, stream=True)
    with httpx.stream("POST", router.url + "/v1/completions", json=body, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: {")
    started.require_nothing_kept()


def test_a_request_that_d_refuses_frees_what_p_keeps(started: Started) -> None:
    """Long before the lease would."""
    ticket = prefilled(started.prefill.url, [9] * 100, "refused")
    until(lambda: started.num_held == 1, timeout_s=10)
    body = body_of([9] * 100, kv_transfer_params=ticket, model="nobody")
    with within(LEASE_S):
        assert started.decodes["shm"].post("/v1/completions", body).status_code == 404
        until(lambda: started.num_held == 0, timeout_s=LEASE_S)
    started.require_nothing_kept()


# Servers that fail. From here on they become fewer.


def test_d_dies_before_its_fetch_and_the_lease_ends(started: Started) -> None:
    prefilled(started.prefill.url, [11] * 500, "lost")
    kill(started.decodes.pop("tcp"))
    answer = httpx.post(started.routers["tcp"].url + "/v1/completions", json=body_of([12] * 500), timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")
    started.require_nothing_kept()


def test_p_dies_after_prefill_and_d_computes_it_again(started: Started, reference: Reference) -> None:
    decode, prompt = started.decodes["shm"], long_prompts(3)[2][:900]
    expected = answers(decode.url, [prompt], cache_salt="alone")
    ticket = prefilled(started.prefill.url, prompt, "orphan")
    kill(started.prefill)
    with within(TIMEOUT_S * 5):
        assert answers(decode.url, [prompt], kv_transfer_params=ticket) == expected
    with within(TIMEOUT_S * 5):  # and the router does without it
        assert answers(started.routers["shm"].url, reference.prompts[:12]) == reference.tokens[:12]
    require_nothing_kept(decode)
