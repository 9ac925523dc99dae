"""litellm, unmodified and in an environment of its own, before P/D: no error, and token counts as of one instance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.clients import needs, run_client
from support.processes import Cluster, cluster

pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True), needs("litellm")]

SUITE = Path(__file__).parents[1] / "support/litellm_suite.py"
BODY = {"model": "m", "temperature": 0, "max_tokens": 12, "seed": 5}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}),
    "completion": ("/v1/completions", {"prompt": "The quick brown fox"}),
}


def alone(fleet: Cluster, name: str) -> dict[str, Any]:
    """What one instance says, in the suite's form."""
    path, asked = ASKED[name]
    answer = httpx.post(fleet.decode[0].url + path, json={**BODY, **asked}, timeout=60).json()
    (choice,) = answer["choices"]
    text = choice["text"] if name == "completion" else choice["message"]["content"]
    return {"text": text, "usage": [answer["usage"][f"{key}_tokens"] for key in ("prompt", "completion", "total")]}


@pytest.mark.timeout(300)
def test_litellm(model_maker: Any, tmp_path: Path) -> None:
    with cluster(model_maker("llama"), tmp_path, num_prefill=2, num_decode=2) as fleet:
        # It would fetch its list of prices.
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        printed = run_client(
            "litellm", "python", str(SUITE), fleet.router.url, folder=tmp_path, timeout_s=240, **offline
        )
        found = json.loads(printed.splitlines()[-1])
        for name in ASKED:
            assert found[name] == found[f"{name}_stream"] == alone(fleet, name)
        assert found["many"] == [found["chat"]["text"]] * 16
        assert (found["logprobs"], found["choices"], found["stopped"]) == (12, 3, "stop")
        assert found["refused"] == {"value": "BadRequestError", "model": "NotFoundError"}
        metrics = fleet.router.get("/metrics").text
        statuses = {line.split('status="')[1][:3] for line in metrics.splitlines() if "router_requests_total{" in line}
        assert statuses == {"200", "400", "404"}
        assert fleet.router.metric("kvferry_router_hand_offs_total") > 20
        fleet.require_clean()
