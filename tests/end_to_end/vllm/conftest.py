"""A plain vLLM server's answers, against which all others are compared."""

from __future__ import annotations

import pytest

from support.shared_prefixes import num_answers, waves
from support.vllm_servers import Reference, Server, answers, prompts, vllm_servers


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Made once, by `kvferry serve --engine vllm` with one instance."""
    shared = [prompt for wave in waves(num_answers(100), 1800, seed=5, lowest=5) for prompt in wave]
    asked = {"any": prompts(count=100, longest=2000), "shared": shared}
    with vllm_servers(tmp_path_factory.mktemp("reference"), alone=Server("serve")) as servers:
        return {name: Reference(these, answers(servers["alone"].url, these)) for name, these in asked.items()}


@pytest.fixture(scope="session")
def reference(references: dict[str, Reference]) -> Reference:
    """Prompts of all kinds."""
    return references["any"]


@pytest.fixture(scope="session")
def shared_reference(references: dict[str, Reference]) -> Reference:
    """Prompts that share prefixes with those asked at the same time."""
    return references["shared"]
