"""The unmodified Anthropic client against real processes: one plain instance, and P/D behind the router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.anthropic_suite import CHECKS, STRUCTURED_CHECKS, create, text_of
from support.processes import Cluster, KvferryProcess, cluster, kvferry

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

pytestmark = pytest.mark.processes

TRANSFER = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 3, "timeout_s": 5}}


@pytest.fixture(scope="module", params=["plain", "prefill and decode"])
def endpoint(
    request: pytest.FixtureRequest, model_maker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KvferryProcess]:
    """The server that the client talks to. At the end every instance must have given everything back."""
    model, folder = model_maker("llama"), tmp_path_factory.mktemp("anthropic")
    with ExitStack() as stack:
        if request.param == "plain":
            options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
            yield stack.enter_context(kvferry("serve", str(model), *options, log=folder / "plain.log"))
            return
        started = stack.enter_context(cluster(model, folder))
        yield started.router
        assert started.router.metric("kvferry_router_hand_offs_total", kind="concurrent") > 0
        started.require_clean()


def clients(url: str) -> tuple[Anthropic, OpenAI]:
    from anthropic import Anthropic
    from openai import OpenAI

    return (
        Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60),
    )


@pytest.mark.parametrize("check", [*CHECKS, *STRUCTURED_CHECKS], ids=lambda check: check.__name__)
def test_anthropic(check: Callable[[Anthropic, OpenAI, str], None], endpoint: KvferryProcess) -> None:
    check(*clients(endpoint.url), "m")


def test_a_stream_whose_decode_instance_is_killed(model_maker: Any, tmp_path: Path) -> None:
    """It is continued by the other one, and the client's events are those of one message."""
    router = ("--health-interval-s=0.2", "--health-timeout-s=2")
    with cluster(
        model_maker("llama"), tmp_path, transfer=TRANSFER, router=router, num_decode=2, ends_cleanly=False
    ) as started:
        anthropic, _ = clients(started.router.url)
        whole = create(anthropic, "m", max_tokens=200)
        chunks, killed = [], False
        arguments: Any = {
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        body = {"temperature": 0, "ignore_eos": True}
        with anthropic.messages.stream(model="m", extra_body=body, **arguments) as received:
            for text in received.text_stream:
                chunks.append(text)
                if len(chunks) == 40 and not killed:
                    killed = True
                    decoding(started).kill()
            message = received.get_final_message()
        assert "".join(chunks) == text_of(message) == text_of(whole)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 200)
        assert started.router.metric("kvferry_router_continuations_total", outcome="done") == 1


def decoding(started: Cluster) -> KvferryProcess:
    """The decode instance with a running request."""
    return next(instance for instance in started.decode if instance.metric("vllm:num_requests_running"))
