"""The unmodified OpenAI client against real processes: one plain instance, and P/D behind the router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from support.openai_suite import CHECKS
from support.processes import KvferryProcess, cluster, kvferry
from support.responses_suite import CHECKS as RESPONSES_CHECKS
from support.responses_suite import STRUCTURED_CHECKS as STRUCTURED_RESPONSES_CHECKS
from support.structured_suite import STRUCTURED_CHECKS

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.processes

STORAGE = {"kv_connector": "SharedStorageConnector"}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "p2p-sequential": {"hand_off": "sequential"},
    "p2p-concurrent": {"hand_off": "concurrent"},
    "shared-storage": {"hand_off": "sequential", "transfer": STORAGE},
}


SHORT = {"plain", "p2p-concurrent"}
"""Topologies that `make test` asks; the others differ in how KV moves, which a client does not see."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[pytest.mark.full] if one not in SHORT else []) for one in TOPOLOGIES],
)
def endpoint(
    request: pytest.FixtureRequest, model_maker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KvferryProcess]:
    """What the client talks to. At the end every instance must have given everything back."""
    model, folder = model_maker("llama"), tmp_path_factory.mktemp(request.param)
    settings = dict(TOPOLOGIES[request.param])
    with ExitStack() as stack:
        if request.param == "plain":
            options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
            plain = stack.enter_context(kvferry("serve", str(model), *options, log=folder / "plain.log"))
            yield plain
            plain.require_clean()
            return
        if "transfer" in settings:
            path = {"kv_connector_extra_config": {"shared_storage_path": str(folder / "store")}}
            settings["transfer"] = {**settings["transfer"], **path}
        started = stack.enter_context(cluster(model, folder, **settings))
        yield started.router
        started.require_clean()


ALL_CHECKS = [*CHECKS, *STRUCTURED_CHECKS, *RESPONSES_CHECKS, *STRUCTURED_RESPONSES_CHECKS]


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_openai(check: Callable[[OpenAI, str], None], endpoint: KvferryProcess) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        check(client, "m")
