"""NVIDIA Dynamo's planner in a process of its own: `dynamo_planner.py` starts it and tells it every five seconds what
it would have seen. It runs in another environment, of which it uses no more than this:

    python3.11 -m venv ENV
    ENV/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 aisimulate==0.13.0.dev202610270000000085
    ENV/bin/pip install scikit-learn scipy kubernetes pydantic numpy pandas msgspec pyyaml prometheus_client aiohttp \
        packaging jsonschema plotly prometheus-api-client pmdarima filterpy prophet grpcio protobuf

(PyPI's `aisimulate` 0.13.0 is a placeholder; this pre-release is the nearest that is there.)

What runs is Dynamo's: configuration, load predictor, performance model and its regression, throughput scaling, the
plugin pipeline, and the adapter with which Dynamo replays traces offline (`dynamo.planner.offline.replay_adapter`).
What is replaced: Prometheus and the Kubernetes connector, by lines of JSON on standard input and output; and the
profile, by the times of steps of the simulated instances, on the grid that Dynamo's own replay uses. Its load scaling
is off, as it is by default, because it reads engines' queues in the format of its own workers.

First line: targets, settings, limits and profile. Each further line is one interval; each answer has the counts wanted,
null where they are to stay.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities
from dynamo.planner.offline.replay_adapter import ReplayPlannerAdapter, create_replay_planner_adapter


def planner_of(settings: dict[str, Any]) -> ReplayPlannerAdapter:
    """As `dynamo.replay.planner.prepare_planner_replay` makes it, with a profile that was measured."""
    config = PlannerConfig.model_validate(
        {
            "mode": "disagg",
            "optimization_target": "sla",
            "ttft_ms": settings["ttft_ms"],
            "itl_ms": settings["itl_ms"],
            "max_gpu_budget": settings["most_instances"],
            "prefill_engine_num_gpu": 1,
            "decode_engine_num_gpu": 1,
            "advisory": True,
            "pre_deployment_sweeping_mode": "none",
            **settings["settings"],
        }
    )
    engine = EngineCapabilities(num_gpu=1, **settings["limits"])
    adapter = create_replay_planner_adapter(
        config, WorkerCapabilities(prefill=engine, decode=engine), capture_details=False
    )
    adapter.install_benchmark_fpms(
        prefill_fpms=[
            _step(seconds, num_prefill_requests=1, sum_prefill_tokens=tokens)
            for tokens, seconds in settings["profile"]["prefill"]
        ],
        decode_fpms=[
            _step(seconds, num_decode_requests=number, sum_decode_kv_tokens=tokens)
            for number, tokens, seconds in settings["profile"]["decode"]
        ],
    )
    adapter.start()
    return adapter


def _step(seconds: float, **scheduled: int) -> ForwardPassMetrics:
    return ForwardPassMetrics(wall_time=seconds, scheduled_requests=ScheduledRequestMetrics(**scheduled))


def main() -> None:
    logging.disable(logging.CRITICAL)
    with planner_of(json.loads(sys.stdin.readline())) as adapter:
        for ordinal, line in enumerate(sys.stdin):
            decision = adapter.on_tick({**json.loads(line), "tick_ordinal": ordinal})
            answer = {"prefill": decision["target_prefill"], "decode": decision["target_decode"]}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
