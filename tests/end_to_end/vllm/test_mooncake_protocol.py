"""What the router sends in Mooncake's form, given to vLLM's own classes: its bootstrap server and its connector's
scheduler side, which run without the Mooncake library. `test_mooncake` has the whole."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvferry.router.body import RequestBody
from kvferry.router.instances.facts import read_bootstrap
from kvferry.router.instances.instance import Bootstrap
from kvferry.router.protocols.form import Form
from kvferry.router.protocols.mooncake import mooncake
from kvferry.router.request.request_legs import prefill_body

pytestmark = pytest.mark.vllm

TRANSFER = "00000000" + "a" * 24
PROMPT = list(range(5, 75))
BLOCKS = [[4, 5, 6]]


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[Bootstrap]:
    """From vLLM's own server, with which a worker of each of two data-parallel engines has registered."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    server = MooncakeBootstrapServer("127.0.0.1", 0)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        assert read_bootstrap(url, httpx.get(url + "/query").content) is None
        for rank in range(2):
            worker = {"dp_rank": rank, "tp_rank": 0, "pp_rank": 0, "addr": f"tcp://127.0.0.1:{7000 + rank}"}
            httpx.post(url + "/register", json={"engine_id": f"engine-{rank}", **worker}).raise_for_status()
        found = read_bootstrap(url, httpx.get(url + "/query").content)
        assert found == Bootstrap(url=url, engines={0: "engine-0", 1: "engine-1"})
        yield found
    finally:
        server.shutdown()


@pytest.fixture
def form(bootstrap: Bootstrap) -> Form:
    return mooncake(TRANSFER, bootstrap, concurrent=True)


def scheduler_side(role: str) -> Any:
    """vLLM's, with as much of its configuration as it looks at."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorScheduler

    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        kv_transfer_config=SimpleNamespace(kv_role=role),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    caches = SimpleNamespace(transfer_groups=[], has_mamba_layers=False, kv_cache_groups=[], transfer_group_ids=(0,))
    return MooncakeConnectorScheduler(config, "engine-0", caches)


def request_of(name: str, params: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(params or {})})
    return Request(name, PROMPT, sampling, None)


def blocks() -> Any:
    return SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: BLOCKS)


def test_d_fetches_the_whole_prompt_from_the_engine_that_serves_it(form: Form, bootstrap: Bootstrap) -> None:
    decode, request = scheduler_side("kv_consumer"), request_of("d", form.early)
    assert decode.get_num_new_matched_tokens(request, 0) == (len(PROMPT), True)
    decode.update_state_after_alloc(request, blocks(), len(PROMPT))
    [(engine_id, pulls)] = decode.build_connector_meta(SimpleNamespace()).reqs_to_recv.items()
    assert engine_id == "engine-0"
    pull = pulls["d"]
    assert (pull.transfer_id, pull.remote_bootstrap_addr) == (TRANSFER, bootstrap.url)
    assert pull.local_block_ids == BLOCKS


def test_p_keeps_the_kv_for_the_same_transfer(form: Form) -> None:
    from vllm.v1.request import RequestStatus

    prefill, request = scheduler_side("kv_producer"), request_of("p", form.produce)
    assert prefill.get_num_new_matched_tokens(request, 0) == (0, False)
    prefill.update_state_after_alloc(request, blocks(), 0)
    assert prefill.build_connector_meta(SimpleNamespace()).reqs_to_send == {"p": (TRANSFER, [])}
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    keeps, ticket = prefill.request_finished(request, BLOCKS)
    assert keeps
    assert not ticket
    assert prefill.build_connector_meta(SimpleNamespace()).reqs_to_send == {"p": (TRANSFER, BLOCKS)}


def test_p_keeps_nothing_when_a_stop_token_ends_it_so_none_may(form: Form) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.request import RequestStatus

    prefill, request = scheduler_side("kv_producer"), request_of("p", form.produce)
    prefill.update_state_after_alloc(request, blocks(), 0)
    request.status = RequestStatus.FINISHED_STOPPED
    assert prefill.request_finished(request, BLOCKS)[0] is False
    body = RequestBody.parse(b'{"model": "m", "prompt": "x", "stop_token_ids": [7], "min_tokens": 3, "max_tokens": 9}')
    assert body is not None
    asked = CompletionRequest.model_validate_json(prefill_body(body, form, {}))
    assert (asked.ignore_eos, asked.max_tokens, asked.min_tokens, asked.stream) == (True, 1, 1, False)
    assert not asked.stop_token_ids
