"""kvferry's instances as Dynamo's workers: its own frontend hands off between them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.dynamo_workers import Deployment, Worker
from support.ports import free_port
from support.processes import sum_of
from support.waiting import until

pytestmark = [pytest.mark.dynamo, pytest.mark.processes, pytest.mark.timeout(600)]

PROMPTS = [[5 + (number * 37 + place * 11) % 3000 for place in range(20 + 9 * number)] for number in range(12)]


class Behind:
    """A prefill and a decode instance behind Dynamo's frontend."""

    def __init__(self, folder: Path) -> None:
        self.deployment = Deployment(folder)
        self.ports = {name: free_port() for name in ("prefill", "decode", "frontend")}
        self.instances: dict[str, Worker] = {}

    def start(self) -> None:
        """Start all three, and wait until the frontend has the model."""
        for role, component in (("prefill", "prefill"), ("decode", "backend")):
            self.instances[role] = self.deployment.engine(role, component, self.ports[role])
        frontend = self.deployment.frontend(self.ports["frontend"])
        until(self.is_served, 200, lambda: frontend.log + self.instances["decode"].log)

    def is_served(self) -> bool:
        """Whether the frontend answers over both."""
        try:
            return httpx.post(self.url("frontend") + "/v1/completions", json=body(PROMPTS[0])).status_code == 200
        except httpx.TransportError:
            return False

    def url(self, name: str) -> str:
        """The HTTP address of an instance, or of the frontend."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def texts(self, name: str) -> list[str]:
        """The answers to `PROMPTS`."""
        answers = [httpx.post(self.url(name) + "/v1/completions", json=body(one), timeout=60) for one in PROMPTS]
        return [one.json()["choices"][0]["text"] if one.status_code == 200 else one.text for one in answers]


def body(prompt: list[int]) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, "max_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("engines"))
    try:
        made.start()
        yield made
    finally:
        made.deployment.end()


def test_dynamos_frontend_hands_off_between_kvferrys_instances(behind: Behind) -> None:
    metrics = behind.url("decode") + "/metrics"
    before = sum_of(httpx.get(metrics).text, "vllm:external_prefix_cache_hits_total")
    assert behind.texts("frontend") == behind.texts("decode")
    fetched = sum_of(httpx.get(metrics).text, "vllm:external_prefix_cache_hits_total") - before
    assert fetched > sum(map(len, PROMPTS)) / 2
    refused = httpx.post(
        behind.url("frontend") + "/v1/completions", json={**body([5]), "max_tokens": 99999}, timeout=30
    )
    assert refused.status_code in (200, 400)
    for role in ("prefill", "decode"):
        assert httpx.get(behind.url(role) + "/kvferry/check").status_code == 200


def test_an_instance_that_ends_leaves_dynamos_discovery_at_once(behind: Behind) -> None:
    cards = behind.deployment.store / "v1" / "instances"
    assert any("prefill" in one.name for one in cards.iterdir())
    behind.instances["prefill"].strike(signal.SIGTERM)
    until(lambda: not any("prefill" in one.name for one in cards.iterdir()), 8)
