"""What several ranks report, as one."""

import random

import msgspec
import pytest

from kvferry.connectors.api import (
    Failed,
    Fetchable,
    Loaded,
    Prefilled,
    Released,
    TransferEvent,
    TransferReport,
    failures,
)
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.report_codec import decode_report, encode_report
from kvferry.core.errors import (
    KvferryError,
    LayoutMismatch,
    LeakError,
    LeaseEnded,
    PeerLost,
    ProtocolError,
    TransferError,
)
from kvferry.core.messages.hand_off import PrefillResult

RESULT = PrefillResult(first_token=4, seed=1)
LOST = PeerLost("gone")


def loaded(*names: str) -> TransferReport:
    return [Loaded(name) for name in names]


def failed(name: str, error: KvferryError = LOST) -> TransferReport:
    return [Failed(name, error)]


def released(*names: str) -> TransferReport:
    return [Released(name) for name in names]


def test_one_rank_is_passed_on_as_it_is() -> None:
    ranks = RankReports(1)
    report = [Prefilled("a", RESULT), Loaded("a", 5), Failed("b", LOST), Released("c")]
    ranks.add(0, report)
    assert ranks.take() == report
    assert not ranks.take()
    ranks.check()


def test_loaded_when_all_have_loaded() -> None:
    ranks = RankReports(3)
    ranks.add(2, loaded("a", "b"))
    ranks.add(0, loaded("b"))
    assert not ranks.take()
    with pytest.raises(LeakError, match="a"):
        ranks.check()
    ranks.add(1, loaded("b"))
    assert ranks.take() == loaded("b")
    ranks.add(1, loaded("a"))
    ranks.add(0, loaded("a"))
    assert ranks.take() == loaded("a")
    ranks.check()


def test_of_prefixes_the_shortest_counts() -> None:
    ranks = RankReports(3)
    for rank, report in enumerate([[Loaded("a", 8)], loaded("a"), [Loaded("a", 6)]]):
        ranks.add(rank, report)
    assert ranks.take() == [Loaded("a", 6)]
    ranks.check()


def test_failed_when_one_failed_and_no_rank_still_writes() -> None:
    ranks = RankReports(2)
    ranks.add(1, failed("a"))
    assert not ranks.take(), "rank 0 still writes to the blocks"
    ranks.add(0, loaded("a"))
    assert ranks.take() == failed("a")
    ranks.check()


def test_of_several_failures_the_cause_is_told() -> None:
    ranks = RankReports(3)
    ranks.add(0, failed("a", LeaseEnded("released")))
    ranks.add(2, failed("a"))
    ranks.add(1, failed("a", ProtocolError("later")))
    assert ranks.take() == [Failed("a", LOST)]


def test_released_when_all_have_released() -> None:
    ranks = RankReports(2)
    ranks.add(0, released("a"))
    assert not ranks.take()
    ranks.add(1, released("a"))
    assert ranks.take() == released("a")
    ranks.check()


def test_a_cancelled_load_that_had_ended_on_one_rank() -> None:
    ranks = RankReports(2)
    ranks.add(0, failed("a"))
    ranks.add(0, released("a"))
    assert not ranks.take()
    ranks.add(1, released("a"))
    assert ranks.take() == released("a")
    ranks.check()
    ranks.add(0, loaded("a"))
    assert not ranks.take(), "nothing is left of the request that had this name"


def test_what_the_first_rank_hears_of_the_prefill_is_told_at_once() -> None:
    ranks = RankReports(2)
    ranks.add(1, [Fetchable("a"), Prefilled("a", RESULT), Loaded("a")])
    assert ranks.take() == [Fetchable("a"), Prefilled("a", RESULT)]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_tells_each_request_once(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, names = rng.randint(1, 4), [f"r{number}" for number in range(8)]
    fails = {(rank, name) for rank in range(num_ranks) for name in names if rng.random() < 0.15}
    events = [
        (rank, failed(name) if (rank, name) in fails else loaded(name)) for rank in range(num_ranks) for name in names
    ]
    rng.shuffle(events)
    ranks, told = RankReports(num_ranks), list[TransferEvent]()
    for rank, report in events:
        ranks.add(rank, report)
        if rng.random() < 0.5:
            told += ranks.take()
    told += ranks.take()
    lost = {name for _, name in fails}
    assert sorted(event.request_id for event in told if isinstance(event, Loaded)) == sorted(set(names) - lost)
    assert sorted(failures(told)) == sorted(lost)
    ranks.check()


def test_a_report_survives_its_encoding() -> None:
    mismatch = LayoutMismatch("dtype", "float32", "bfloat16")
    told = [Loaded("a", 5), Released("d"), Prefilled("a", RESULT)]
    found = decode_report(encode_report([Failed("b", LOST), *told, Failed("c", mismatch)]))
    assert found[1:-1] == told
    errors = failures(found)
    assert {name: (type(error), str(error)) for name, error in errors.items()} == {
        "b": (PeerLost, "gone"),
        "c": (LayoutMismatch, str(mismatch)),
    }
    assert vars(errors["c"]) == {"field": "dtype", "local": "float32", "remote": "bfloat16"}


@pytest.mark.parametrize(
    "encoded", [b"\x93junk", b"", *map(msgspec.msgpack.encode, [["Loaded"], [["Lost", "a"]], [["Failed", "a", 5]]])]
)
def test_bytes_that_no_rank_sends(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="report"):
        decode_report(encoded)


def test_a_load_that_a_strangers_connector_ends_with_any_error_is_a_transfer_error() -> None:
    [event] = decode_report(encode_report([Failed("r", ValueError("out of cheese"))]))  # type: ignore[arg-type]
    assert isinstance(event, Failed)
    assert type(event.error) is TransferError
    assert "ValueError: out of cheese" in str(event.error)
