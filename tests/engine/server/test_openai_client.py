"""The unmodified OpenAI client against the server, with an engine that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from support.openai_suite import CHECKS
from support.responses_suite import CHECKS as RESPONSES_CHECKS

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("check", [*CHECKS, *RESPONSES_CHECKS], ids=lambda check: check.__name__)
def test_openai(check: Callable[[OpenAI, str], None], client: OpenAI) -> None:
    check(client, "test-model")
