"""`kvferry serve --engine vllm` as a user runs it, with a connector of vLLM's own, until Ctrl-C."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import httpx
import pytest

from kvferry.router.request.releases import NO_MODEL
from support.vllm_servers import (
    Reference,
    Served,
    answers,
    body_of,
    figure,
    held,
    hold_open,
    prefilled,
    require_idle,
    serve_pair,
)
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed; scripts/install_vllm_cpu.sh says how")
    with serve_pair(tmp_path_factory.mktemp("serve"), {"kv_connector": "NixlConnector"}) as one:
        yield one


def test_what_is_started_is_told(served: Served) -> None:
    log = served.log.read_text()
    for name in ("prefill-0", "decode-0"):
        assert f"kvferry: starting {name}\n" in log
        assert f"[{name}] ready at http://127.0.0.1:" in log


def test_tokens_over_nixl_are_those_of_one_server(served: Served, reference: Reference) -> None:
    decode = served.behind("decode")
    source = {"source": "external_kv_transfer"}
    before = figure(decode, "vllm:prompt_tokens_by_source_total", **source)
    assert answers(served.url, reference.prompts) == reference.tokens
    received = figure(decode, "vllm:prompt_tokens_by_source_total", **source) - before
    assert reference.num_prompt_tokens / 2 < received <= reference.num_prompt_tokens
    assert figure(decode, "vllm:nixl_bytes_transferred_sum") > 0
    assert figure(served.url, "kvferry_router_hand_offs_total", kind="sequential") == len(reference.prompts)
    require_idle(served.behind("prefill"))
    require_idle(decode)


def test_clients_that_leave(served: Served) -> None:
    asked = [body_of([5 + (place * (number + 2)) % 3900 for place in range(2500)]) for number in range(6)]
    with hold_open(served.url, asked):
        until(lambda: figure(served.url, "kvferry_router_instance_in_flight", role="prefill") >= 2, timeout_s=60)
    until(lambda: figure(served.url, "kvferry_router_instance_in_flight") == 0, timeout_s=60)
    require_idle(served.behind("prefill"))
    require_idle(served.behind("decode"))


def test_a_ticket_that_nobody_fetches_is_given_up_through_d(served: Served) -> None:
    """With the request that the router sends for it; the lease would last 30 s."""
    prefill = served.behind("prefill")
    body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": prefilled(prefill, [9] * 700)}
    assert held(prefill) > 0
    assert httpx.post(served.behind("decode") + "/v1/completions", json=body, timeout=60).status_code == 404
    require_idle(prefill, timeout_s=20)


def test_ctrl_c_ends_everything(served: Served) -> None:
    """The last of this module."""
    served.require_ends()
