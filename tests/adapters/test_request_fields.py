"""Every field of vLLM's requests is decided on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.api.requests import ChatCompletionRequest, CompletionRequest
from support.request_schemas import undecided

pytestmark = pytest.mark.vllm


def test_every_field_of_vllm_is_decided_on() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as Chat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as Completion

    assert "structured_outputs" in Chat.model_fields
    assert undecided(Chat.model_fields, ChatCompletionRequest) == set()
    assert undecided(Completion.model_fields, CompletionRequest) == set()


def test_the_table_of_the_api_is_of_this_vllm() -> None:
    """`scripts/docs_site/vllm_api.json`, from which the page is made; `scripts/vllm_api.py` writes it anew."""
    import vllm

    scripts = Path(__file__).parents[2] / "scripts"
    table = json.loads((scripts / "docs_site" / "vllm_api.json").read_text())
    if not vllm.__version__.startswith(table["version"]):
        pytest.skip(f"the table is of vLLM {table['version']}")
    written = subprocess.run(
        [sys.executable, str(scripts / "vllm_api.py")], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    assert json.loads(written[written.index("{") :]) == table
