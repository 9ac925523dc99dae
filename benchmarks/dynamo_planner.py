"""Dynamo's planner as a rule: its process (`dynamo_side.py`) is told what the fleet does, and its counts are used
within the same bounds as everybody's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import Counts
from kvferry.sim.times import StepWork
from scaled_rules import INSTANCE, INTERVAL_S, MOST, Rule, Seen

ANSWERS_WITHIN_S = 60.0


class Dynamo(Rule):
    """Use it as a context manager: it has a process."""

    SETTINGS: ClassVar[dict[str, dict[str, Any]]] = {
        "planner": {},
        "planner, 30 s": {"throughput_adjustment_interval_seconds": 30, "load_predictor": "constant"},
    }
    """As it comes (every 180 s, with ARIMA), and as often as an instance takes to start."""

    def __init__(self, python: str, targets: LatencyTargets, settings: dict[str, Any]) -> None:
        side = Path(__file__).with_name("dynamo_side.py")
        self._process = subprocess.Popen([python, str(side)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell(
            {
                "ttft_ms": 1000 * targets.ttft_s,
                "itl_ms": 1000 * targets.itl_s,
                "most_instances": 2 * MOST,
                "settings": settings,
                "limits": {
                    "max_num_batched_tokens": INSTANCE.max_num_batched_tokens,
                    "max_num_seqs": INSTANCE.max_num_seqs,
                    "context_length": INSTANCE.max_model_len,
                    "max_kv_tokens": INSTANCE.num_blocks * INSTANCE.block_size,
                    "kv_cache_block_size": INSTANCE.block_size,
                },
                "profile": _profile(),
            }
        )

    def __enter__(self) -> Dynamo:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWERS_WITHIN_S)

    def decide(self, seen: Seen) -> Counts:
        """Every five seconds, which is how often the planner looks; it decides less often."""
        came = [request for request in seen.report.requests if request.arrived > seen.now - INTERVAL_S]
        over = [
            request
            for request in seen.report.requests
            if request.state == "done"
            and request.arrived + (request.first_s or 0.0) + (request.answer_s or 0.0) > seen.now - INTERVAL_S
        ]
        prompts = sum(request.prompt_tokens for request in came)
        cached = prompts - sum(request.uncached for request in came)
        self._tell(
            {
                "active_prefill_count": seen.ready.prefill,
                "active_decode_count": seen.ready.decode,
                "non_draining_prefill_count": seen.counts.prefill,
                "non_draining_decode_count": seen.counts.decode,
                "active_prefill_ids": list(range(seen.ready.prefill)),
                "active_decode_ids": list(range(seen.ready.decode)),
                "traffic": {
                    "duration_s": INTERVAL_S,
                    "num_req": len(came),
                    "avg_isl": prompts / len(came) if came else 0.0,
                    "avg_osl": sum(request.output_tokens for request in over) / len(over) if over else 0.0,
                    "shape_count": len(came),
                    "avg_kv_hit_rate": cached / prompts if prompts else 0.0,
                    "hit_rate_count": len(came),
                },
            }
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Dynamo's planner has ended, with exit code {self._process.wait()}")
        desired = json.loads(line)
        return Counts(
            _within(desired["prefill"], seen.counts.prefill), _within(desired["decode"], seen.counts.decode)
        )  # fmt: skip

    def _tell(self, about: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(about) + "\n")
        self._process.stdin.flush()


def _within(desired: int | None, current: int) -> int:
    return current if desired is None else min(MOST, max(1, desired))


def _profile() -> dict[str, Any]:
    """Steps of the simulated instances, on the grid of `dynamo.replay.planner`."""
    most_tokens, times = INSTANCE.max_num_batched_tokens, INSTANCE.times
    prefill = [
        (tokens, times.seconds(StepWork(tokens, context_tokens=tokens)))
        for tokens in range(100, most_tokens + 1, (most_tokens - 100) // 8)
    ]
    decode = [
        (number, number * context, times.seconds(StepWork(decode_sequences=number, context_tokens=number * context)))
        for context in (500, 2000, 4000, 8000)
        for number in range(1, INSTANCE.max_num_seqs + 1, INSTANCE.max_num_seqs // 8)
        if number * context <= INSTANCE.num_blocks * INSTANCE.block_size
    ]
    return {"prefill": prefill, "decode": decode}
