"""The servers that these tests share: two for prefill, two for decode, and one that does both for comparison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fleets import use_state_in
from support.processes import KvferryProcess
from support.sglang_python import PYTHON
from support.sglang_servers import DISAGGREGATED, ENVIRONMENT, MODEL, ON_CPU, SIZES, SglangFleet, plain_server

SPEC = """
name = "sglangs"
model = "{model}"
mode = "pooling"
served_model_name = ["m"]
grace_s = 5
[engine]
kind = "sglang"
python = "{python}"
connector = ["mooncake_tcp"]
args = {arguments}
[role.prefill]
count = 2
max = 3
can_be = ["decode"]
[role.decode]
count = 2
max = 3
can_be = ["prefill"]
[router]
port = 0
count = 1
disaggregate_from = "0"
health_timeout_s = 10
[failure]
backoff = ["100ms", "1s"]
crash_loop = 100
drain = "30s"
"""


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangFleet]:
    """Two P, two D and a router, from a spec with `kind = "sglang"`."""
    folder = tmp_path_factory.mktemp("sglangs")
    arguments = [*ON_CPU, *SIZES, *DISAGGREGATED]
    with pytest.MonkeyPatch.context() as patch:
        use_state_in(folder, patch)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        fleet = SglangFleet(folder, "sglangs")
        try:
            fleet.apply(SPEC.format(model=MODEL, python=PYTHON, arguments=arguments), "--wait-s=0")
            fleet.until_ready(2, 2)
            yield fleet
        finally:
            fleet.delete()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvferryProcess]:
    """One server that does both phases."""
    with plain_server(tmp_path_factory.mktemp("plain") / "plain.log") as server:
        yield server
