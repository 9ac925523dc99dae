"""A plain vLLM server's answers, against which all others are compared."""

from __future__ import annotations

import pytest

from support.vllm_servers import Reference, Server, answers, prompts, vllm_servers


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Made once, by `kvferry serve --engine vllm` with one instance."""
    asked = prompts(count=100, longest=2000)
    with vllm_servers(tmp_path_factory.mktemp("reference"), alone=Server("serve")) as servers:
        return Reference(asked, answers(servers["alone"].url, asked))
