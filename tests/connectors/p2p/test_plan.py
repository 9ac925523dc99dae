"""Plans of the P2P connector, and the metadata of a hand-off."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.connectors.p2p.plan import HandOffMeta, P2pPlan, Save, Seal, decode_meta, encode_meta
from kvferry.core.errors import ProtocolError
from kvferry.core.messages.hand_off import PrefillResult


@pytest.mark.parametrize(
    "plan",
    [P2pPlan(resets=["t"]), P2pPlan(drops={"t": ""}), P2pPlan(saves=[Save("t", True, 0, [1])]), P2pPlan(cancels=["r"])],
)
def test_any_work_is_sent(plan: P2pPlan) -> None:
    assert plan
    assert not P2pPlan()


def test_what_is_taken_is_gone() -> None:
    plan = P2pPlan()
    assert plan.take() is None
    plan.resets.append("t")
    plan.seals.append(Seal("t", "r", b"meta", [1, 2], 480.0))
    taken = plan.take()
    assert taken == P2pPlan(resets=["t"], seals=[Seal("t", "r", b"meta", [1, 2], 480.0)])
    assert plan == P2pPlan()
    plan.resets.append("another")
    assert taken.resets == ["t"], "what comes later is not part of it"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=P2pPlan) == taken


def test_metadata_is_read_as_it_was_written() -> None:
    for result in (None, PrefillResult(first_token=3, seed=4)):
        meta = HandOffMeta(5, [(4, "digest")], result)
        assert decode_meta(encode_meta(meta)) == meta


@pytest.mark.parametrize(
    "encoded", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"num_tokens": "x"}), b"\x91" * 10_000]
)
def test_what_is_no_metadata_is_refused(encoded: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_meta(encoded)
