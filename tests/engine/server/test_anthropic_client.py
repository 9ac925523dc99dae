"""The unmodified Anthropic client against the server, with an engine that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from support.anthropic_suite import CHECKS

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI


@pytest.fixture(scope="module")
def clients(base_url: str) -> Iterator[tuple[Anthropic, OpenAI]]:
    from anthropic import Anthropic
    from openai import OpenAI

    url = base_url.removesuffix("/v1")
    with (
        Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as anthropic,
        OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as openai,
    ):
        yield anthropic, openai


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_anthropic(check: Callable[[Anthropic, OpenAI, str], None], clients: tuple[Anthropic, OpenAI]) -> None:
    check(*clients, "test-model")
