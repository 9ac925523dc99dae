"""A lease that a peer tells is renewed at a part of it: one that is no length of time is refused where it is read."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvferry.transport.lookup_buffer.messages import ProducerInfo


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 1e-9, 1e300, math.inf, -math.inf, math.nan])
def test_a_lease_must_be_a_time(lease_s: float) -> None:
    right = ProducerInfo(1, (), 30.0, {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(right), type=type(right)) == right
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(ProducerInfo(1, (), lease_s, {})), type=type(right))
