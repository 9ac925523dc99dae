"""A read of a peer's memory that does not return: D computes the prompt in other blocks, and keeps those aside that may
still be written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connectors import reports
from support.endless import EndlessFabric
from support.engines import GREEDY, random_prompts, require_same
from support.pairs import pair_of

pytestmark = pytest.mark.short_deadlines

TIMEOUT_S = 0.3
EXTRA = {"transport": "support.endless:EndlessFabric", "timeout_s": TIMEOUT_S}
BLOCK = {"block_size": 8}


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(reports.Reports, "grace_s", 0.1)
    EndlessFabric.gate.clear()
    yield EndlessFabric.gate
    EndlessFabric.gate.set()


@pytest.mark.parametrize("connector", ["P2pConnector", "MultiConnector"])
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_d_computes_what_does_not_come(
    form: str, connector: str, gate: threading.Event, model_maker: Any, tmp_path: Any
) -> None:
    extra: dict[str, Any] = EXTRA
    if connector == "MultiConnector":
        cache = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{tmp_path}"}}
        p2p = {"kv_connector": "P2pConnector", "kv_connector_extra_config": EXTRA}
        extra = {"connectors": [p2p, cache]}
    with pair_of(model_maker("llama"), connector, extra=extra, prefill=BLOCK, decode=BLOCK) as pair:
        prompts = random_prompts(3, pair.decode.model.vocab_size, longest=60, block_size=8, seed=6)
        found = pair.run(prompts, GREEDY, form, must_load=False)
        failures = pair.decode.statistics().external_kv.num_load_failures
        assert failures == {"TransferTimeout": 3}
        num_held = len(pair.decode.scheduler.external_kv.held_blocks)
        assert num_held > 0, "nobody else gets these blocks"
        assert pair.decode.statistics().external_kv.num_held == 3
        gate.set()
        end = time.monotonic() + 20
        while pair.decode.scheduler.external_kv.held_blocks:
            assert time.monotonic() < end
            pair.decode.step()
        require_same(found, pair.run(prompts, GREEDY, form, must_load=False))
        assert pair.decode.statistics().external_kv.num_load_failures == failures, "what is read comes again"
        pair.settle()
