"""vLLM servers with vLLM's own MooncakeConnector, whose KV Mooncake's Transfer Engine moves over TCP."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_servers import Reference, Served, answers, body_of, figure, hold_open, require_idle, serve_pair
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900), pytest.mark.full]

ON_CPU = Path(__file__).parents[2] / "support" / "on_cpu"
ABANDONED_S = 20
"""So long does vLLM keep the KV of a prompt for a D that does not come; by default, 480 s."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed; scripts/install_vllm_cpu.sh says how")
    transfer = {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "mooncake_on_cpu",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    more = {
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ON_CPU)]),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(ABANDONED_S),
    }
    with serve_pair(tmp_path_factory.mktemp("serve"), transfer, **more) as one:
        yield one


def test_tokens_over_mooncake_are_those_of_one_server(served: Served, reference: Reference) -> None:
    decode = served.behind("decode")
    assert answers(served.url, reference.prompts) == reference.tokens
    received = figure(decode, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert reference.num_prompt_tokens / 2 < received <= reference.num_prompt_tokens
    assert figure(served.url, "kvferry_router_hand_offs_total", kind="concurrent") == len(reference.prompts)
    require_idle(served.behind("prefill"))
    require_idle(decode)


def test_clients_that_leave(served: Served, reference: Reference) -> None:
    asked = [body_of([5 + (place * (number + 2)) % 3900 for place in range(2500)]) for number in range(6)]
    with hold_open(served.url, asked):
        until(lambda: figure(served.url, "kvferry_router_instance_in_flight", role="prefill") >= 2, timeout_s=60)
    until(lambda: figure(served.url, "kvferry_router_instance_in_flight") == 0, timeout_s=60)
    require_idle(served.behind("prefill"), timeout_s=ABANDONED_S + 60)
    require_idle(served.behind("decode"))
    assert answers(served.url, reference.prompts[:20]) == reference.tokens[:20]


def test_ctrl_c_ends_everything(served: Served) -> None:
    """The last of this module."""
    served.require_ends()
