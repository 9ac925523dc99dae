"""Prefill and decode servers that are killed, stopped, or met in the wrong place: every request gets its own answer or
a named error, in time."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from support.processes import KvferryProcess
from support.sglang_servers import Asking, SglangFleet, bootstrap_port, cases, figure, post, require_idle
from support.vllm_servers import hold_open
from support.waiting import until

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.timeout(900)]

NAMED = (502, 503, 504)


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_is_killed_costs_no_wrong_answer_and_serves_again(fleet: SglangFleet, role: str) -> None:
    killed = fleet.names(role)[0]
    pid = fleet.pid(killed)
    assert pid is not None
    with Asking(fleet.status.url, errors=NAMED) as asking:
        asking.more(5)
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
        until(lambda: len(fleet.ready(role)) < 2, 60, lambda: fleet.log)
        asking.more(10)
        fleet.until_ready(2, 2)
        asking.more(10)
    assert asking.wrong == []
    require_idle(*fleet.urls("prefill"), *fleet.urls("decode"))


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_stands_still_is_left_alone(fleet: SglangFleet, role: str) -> None:
    stopped = fleet.names(role)[0]
    pid = fleet.pid(stopped)
    assert pid is not None
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    with Asking(fleet.status.url, errors=NAMED) as asking:
        asking.more(3)
        try:
            for process in tree:
                process.send_signal(signal.SIGSTOP)
            asking.more(10)
        finally:
            for process in tree:
                process.send_signal(signal.SIGCONT)
        fleet.until_ready(2, 2)
        asking.more(10)
    assert asking.wrong == []
    require_idle(*fleet.urls("prefill"), *fleet.urls("decode"))


def test_a_room_that_is_taken_twice_spoils_no_request_of_others(fleet: SglangFleet, plain: KvferryProcess) -> None:
    """Two requests with one room, without kvferry's router: SGLang 0.5.23 gives one a wrong answer, the other none."""
    prefill, decode = fleet.urls("prefill")[0], fleet.urls("decode")[0]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 77}
    prompts = ["def read(path):", "class Value(list):"]
    expected = [post(plain.url, {"prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]

    def text(url: str, prompt: str) -> str | None:
        try:
            response = post(url, {"prompt": prompt, **room}, timeout_s=5)
        except httpx.TimeoutException:
            return None
        return response.json()["choices"][0]["text"] if response.status_code == 200 else None

    with ThreadPoolExecutor(4) as pool:
        for prompt in prompts:
            pool.submit(text, prefill, prompt)
        answers = list(pool.map(text, [decode] * 2, prompts))
    print(f"a room taken twice: {answers} for {expected}")  # docs/stacks.md
    assert post(fleet.status.url, {"prompt": prompts[0]}).json()["choices"][0]["text"] == expected[0]
    require_idle(*fleet.urls("prefill"), *fleet.urls("decode"))


def test_anothers_bootstrap_server_is_no_trouble_for_others(fleet: SglangFleet) -> None:
    """D is told the bootstrap server of a P that never gets the request."""
    decode = fleet.urls("decode")[0]
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 99}
    place["bootstrap_port"] = bootstrap_port(fleet.urls("prefill")[1])
    with hold_open(decode, [{"model": "m", "prompt": "x", "max_tokens": 4, **place}]):
        assert post(fleet.status.url, {"prompt": "def f"}).status_code == 200  # D serves others meanwhile
    require_idle(decode)


@pytest.mark.full
def test_a_bootstrap_server_that_is_gone_ends_a_decode_server_which_is_started_again(fleet: SglangFleet) -> None:
    """SGLang 0.5.23 does not survive it (`'MooncakeKVReceiver' object has no attribute 'bootstrap_infos'`)."""
    name, decode = fleet.names("decode")[0], fleet.urls("decode")[0]
    before = fleet.pid(name)
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 99, "bootstrap_port": 1}
    with hold_open(decode, [{"model": "m", "prompt": "x", "max_tokens": 4, **place}]):
        until(lambda: fleet.pid(name) != before, 60, lambda: fleet.log)
    assert post(fleet.status.url, {"prompt": "def f"}).status_code == 200  # by the other one
    fleet.until_ready(2, 2)
    assert post(fleet.status.url, {"prompt": "def f"}).status_code == 200


def test_a_client_cannot_name_a_bootstrap_server(fleet: SglangFleet, plain: KvferryProcess) -> None:
    expected = post(plain.url, {"prompt": "def read(path):"}).json()["choices"]
    body = {"prompt": "def read(path):", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5}
    headers = {"X-Override-Bootstrap-Port": "1", "X-Override-Bootstrap-Room": "5", "X-Override-Rid": "mine"}
    assert post(fleet.status.url, body, **headers).json()["choices"] == expected


def test_clients_that_leave_end_their_requests(fleet: SglangFleet) -> None:
    bodies = [{"model": "m", "prompt": [5 + place % 900 for place in range(3000)], "max_tokens": 500}] * 6
    with hold_open(fleet.status.url, bodies):
        until(lambda: figure(fleet.status.url, "kvferry_router_instance_in_flight") >= 2, 60)
    until(lambda: figure(fleet.status.url, "kvferry_router_instance_in_flight") == 0, 60)
    require_idle(*fleet.urls("prefill"), *fleet.urls("decode"))
    [case] = cases(1)
    assert post(fleet.status.url, case.body).status_code == 200
