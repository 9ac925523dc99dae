"""The help of every metric of a running fleet says more than its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.processes import kvferry

pytestmark = [pytest.mark.processes]

CONNECTORS = """{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
  {"kv_connector": "P2pConnector"},
  {"kv_connector": "KVStoreConnector",
   "kv_connector_extra_config": {"load_policy": "measured", "store": ["memory:64MiB", "file:%s"]}}]}}"""


def test_every_help_is_a_sentence(model_maker: Any, tmp_path: Path) -> None:
    arguments = ("serve", str(model_maker("llama")), "--prefill", "1", "--decode", "1", "--disaggregate-from", "0")
    transfer = ("--kv-transfer-config", CONNECTORS % (tmp_path / "kv"))
    with kvferry(*arguments, *transfer, log=tmp_path / "log") as router:
        for number in range(2):
            body = {"prompt": [number + 3] * 80, "max_tokens": 4, "ignore_eos": True}
            assert router.post("/v1/completions", body).status_code == 200
        helps = dict(re.findall(r"^# HELP (\S+) (.*)$", router.get("/metrics?instances=all").text, re.MULTILINE))
    assert "kvferry:connector_0_taken_total" in helps
    assert len(helps) > 80
    assert [f"{name}: {text}" for name, text in helps.items() if not _says_something(name, text)] == []


def _says_something(name: str, text: str) -> bool:
    """True for a sentence with a word that the name does not have."""
    words = re.findall(r"[a-z]+", text.lower())
    more = set(words) - set(re.findall(r"[a-z]+", name.lower())) - {"the", "of", "a"}
    return len(words) >= 3 and bool(more) and text.endswith((".", ")")) and "which describes it" not in text
