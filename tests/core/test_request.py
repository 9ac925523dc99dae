"""Which token ids a model has."""

from __future__ import annotations

import pytest

from kvferry.core.request import are_tokens


@pytest.mark.parametrize("token_ids", [[], [0], [0, 4095, 17]])
def test_tokens_of_a_vocabulary(token_ids: list[int]) -> None:
    assert are_tokens(token_ids, 4096)


@pytest.mark.parametrize("wrong", [-1, 4096, 2**63, 2**64, -(2**70)])
def test_a_token_outside_of_it(wrong: int) -> None:
    assert not are_tokens([1, wrong, 2], 4096)
