"""aiperf, unmodified and in an environment of its own, replays a trace before P/D: no error, and its token counts are
those of the trace.

The trace has Mooncake's form: requests at fixed times, with prompts that share blocks. aiperf makes prompts of it with
the model's own tokenizer, and reads `usage` of the answers.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.clients import needs, run_client
from support.processes import KvferryProcess, cluster

pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True), needs("aiperf")]

BLOCK = 64
"""Tokens of a block in the trace."""
NUM_REQUESTS, SECONDS = 40, 10.0
TOKENIZER = "local/tok"
PATH = "/v1/chat/completions"


def write_trace(path: Path) -> list[dict[str, Any]]:
    """Turns of some conversations, all of which begin with one shared block."""
    rng, fresh = random.Random(1), iter(range(1, 10**6))
    talks: list[list[int]] = [[0] for _ in range(NUM_REQUESTS // 4)]
    lines = []
    for number in range(NUM_REQUESTS):
        talk = rng.choice(talks)
        talk.append(next(fresh))
        at, blocks = int(1000 * SECONDS * number / NUM_REQUESTS), list(talk)
        line = {"timestamp": at, "input_length": BLOCK * len(talk), "output_length": rng.randrange(4, 24)}
        lines.append({**line, "hash_ids": blocks})
        if len(talk) > 6:
            del talk[1:]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def tokenizer_home(model: Path, home: Path) -> str:
    """A hub's cache with the model's tokenizer, since aiperf takes names of the hub."""
    repository = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, snapshot / file.name)
    return str(home)


def replay(router: KvferryProcess, model: Path, folder: Path) -> dict[str, Any]:
    """aiperf's own summary."""
    out = folder / "artifacts"
    run_client(
        *("aiperf", "aiperf", "profile", "--model", "m", "--url", router.url, "--endpoint-type", "chat"),
        *("--streaming", "--input-file", str(folder / "trace.jsonl"), "--custom-dataset-type", "mooncake_trace"),
        *("--fixed-schedule", "--prompt-input-tokens-block-size", str(BLOCK), "--tokenizer", TOKENIZER),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", str(out)),
        *("--ui", "none", "--workers-max", "2"),
        folder=folder,
        timeout_s=500,
        HF_HOME=tokenizer_home(model, folder / "hf"),
    )
    summary: dict[str, Any] = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    return summary


@pytest.mark.timeout(600)
def test_aiperf_replays_a_trace(model_maker: Any, tmp_path: Path) -> None:
    model = model_maker("llama")
    trace = write_trace(tmp_path / "trace.jsonl")
    with cluster(model, tmp_path, num_prefill=2, num_decode=2, engine=("--max-model-len=1024",)) as fleet:
        summary = replay(fleet.router, model, tmp_path)
        assert summary["request_count"]["avg"] == NUM_REQUESTS
        assert not summary.get("error_request_count", {"avg": 0})["avg"]
        asked = sum(line["output_length"] for line in trace)
        assert round(summary["output_sequence_length"]["avg"] * NUM_REQUESTS) == asked
        assert fleet.router.metric("kvferry_router_requests_total", path=PATH, status="200") == NUM_REQUESTS
        assert fleet.router.metric("kvferry_router_requests_total") == NUM_REQUESTS
        assert fleet.router.metric("kvferry_router_hand_offs_total") == NUM_REQUESTS
        # What the instances themselves have counted.
        made = sum(one.metric("vllm:generation_tokens_total") for one in fleet.decode)
        read = sum(one.metric("vllm:prompt_tokens_total") for one in fleet.prefill)
        assert (made, read) == (asked, round(summary["input_sequence_length"]["avg"] * NUM_REQUESTS))
        fleet.require_clean()
