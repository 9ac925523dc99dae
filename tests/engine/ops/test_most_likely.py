"""The most likely permitted token, by the kernel and without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.engine.ops import most_likely
from kvferry.engine.ops.most_likely import most_likely_permitted


@pytest.fixture(params=["kernel", "numpy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(most_likely, "library", lambda: None)
    elif most_likely.library() is None:
        pytest.skip("no compiler here")


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 200, 4095, 130_076])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 1.0])
def test_the_first_of_the_largest(either: None, vocab: int, share: float) -> None:
    random = np.random.default_rng(vocab)
    for scale in (1.0, 1e30, 0.0):  # the last: all are equal
        logits = (random.standard_normal(vocab) * scale).astype(np.float32)
        logits[random.random(vocab) < 0.1] = -np.inf
        permitted = random.random(vocab) < share
        masked = np.where(permitted, logits, -np.inf)
        expected = None if masked.max() == -np.inf else int(masked.argmax())
        bits = np.packbits(permitted, bitorder="little")
        assert most_likely_permitted(torch.from_numpy(logits), bits) == expected


def test_rows_of_a_batch(either: None) -> None:
    logits = torch.arange(30, dtype=torch.float32).reshape(3, 10)
    bits = np.packbits(np.arange(10) < 7, bitorder="little")
    assert [most_likely_permitted(row, bits) for row in logits] == [6, 6, 6]
    assert most_likely_permitted(logits.t()[3], np.array([0b101], dtype=np.uint8)) == 2
