"""The OpenAPI document against real processes: one plain instance, and P/D behind the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.processes import cluster, kvferry
from support.schema_run import require_conforming

pytestmark = pytest.mark.processes

SHORT = ("--max-model-len=64",)
"""Most chats ask for as much as there is room for."""


PHASES = [
    pytest.param("examples,fuzzing", marks=pytest.mark.full(in_every_part=True)),
    pytest.param("examples,coverage,fuzzing", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("phases", PHASES)
def test_a_plain_instance_keeps_its_promises(model_maker: Any, tmp_path: Path, phases: str) -> None:
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB", *SHORT)
    with kvferry("serve", str(model_maker("llama")), *options, log=tmp_path / "plain.log") as plain:
        require_conforming(plain.url, tmp_path, examples=4, phases=phases)
        plain.require_clean()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_router_before_two_instances_keeps_them(model_maker: Any, tmp_path: Path) -> None:
    with cluster(model_maker("llama"), tmp_path, engine=SHORT) as started:
        require_conforming(started.router.url, tmp_path, examples=30, phases="examples,coverage,fuzzing")
        started.require_clean()
