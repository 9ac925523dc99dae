import threading

import pytest
from kv_support import make_layout

from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeakError
from kvferry.transport.lookup_buffer.entries import Cursor, EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.messages import KeyUpdate, Part
from kvferry.transport.memory import BlockGeometry

ALL_LAYERS = 3
LAYOUT = make_layout(ALL_LAYERS)
PART = Part(0, ALL_LAYERS, 0, [4, 5])


def make_table(clock: ManualClock | None = None, **bounds: float) -> EntryTable:
    return EntryTable(BlockGeometry.dense(LAYOUT, 16), clock or ManualClock(), EntryBounds(**bounds))


def sealed_table(clock: ManualClock, **bounds: float) -> tuple[EntryTable, int]:
    table = make_table(clock, **bounds)
    assert table.open("k")
    assert table.insert("k", PART)
    table.seal("k", b"meta")
    return table, generation_of(table)


def generation_of(table: EntryTable, key: str = "k") -> int:
    cursor = Cursor(key)
    table.next_update(cursor)
    return cursor.generation


def told(table: EntryTable, key: str = "k") -> KeyUpdate | None:
    """To a consumer that asks only now."""
    return table.next_update(Cursor(key))


def over(reason: str) -> KeyUpdate:
    return KeyUpdate(0, -1, end_reason=reason)


def test_updates_come_once_and_in_order() -> None:
    table, cursor = make_table(), Cursor("k")
    assert table.next_update(cursor) is None
    table.open("k")
    assert table.next_update(cursor) == KeyUpdate(0, cursor.generation)
    table.insert("k", PART)
    table.insert("k", Part(0, 1, 2, [7]))
    assert table.next_update(cursor) == KeyUpdate(0, cursor.generation, [PART, Part(0, 1, 2, [7])])
    assert table.next_update(cursor) is None
    table.seal("k", b"meta")
    assert table.next_update(cursor) == KeyUpdate(0, cursor.generation, meta=b"meta")
    assert table.next_update(cursor) is None
    table.drop("k")
    assert table.next_update(cursor) == KeyUpdate(0, cursor.generation, end_reason="dropped")
    assert table.next_update(cursor) is None


def test_long_updates_are_divided() -> None:
    table, cursor = make_table(), Cursor("k")
    table.open("k")
    for index in range(5):
        table.insert("k", Part(0, 1, index * 60_000, list(range(60_000))))
    table.seal("k", b"")
    num_parts, metas = 0, list[bytes | None]()
    while (update := table.next_update(cursor)) is not None:
        assert sum(len(part.block_ids) for part in update.parts) < 200_000
        num_parts += len(update.parts)
        metas.append(update.meta)
    assert num_parts == 5
    assert metas == [*[None] * (len(metas) - 1), b""], "the seal comes with the last part"


def test_a_take_ends_the_key_once() -> None:
    table, generation = sealed_table(ManualClock())
    assert table.take("k", generation)
    assert not table.take("k", generation)
    assert table.ended(["k", "another"]) == ["k", "another"]
    assert table.end_reason("k") == "taken"
    table.check()


def test_a_key_that_several_take_ends_with_the_last() -> None:
    table, generation = sealed_table(ManualClock())
    assert table.take("k", generation, 2, 3)
    assert table.take("k", generation, 2, 3), "who asks again has it still"
    assert table.take("k", generation, 0, 3)
    assert table.ended(["k"]) == []
    assert table.take("k", generation, 1, 3)
    assert table.end_reason("k") == "taken"
    assert not table.take("k", generation, 1, 3)


def test_the_readers_of_several_consumers_are_not_added_up() -> None:
    """One of the first consumer's ranks has died; the second, which has the same ticket, still reads with one."""
    table, generation = sealed_table(ManualClock())
    assert table.take("k", generation, 0, 2, "first")
    assert table.take("k", generation, 1, 2, "second")
    assert table.ended(["k"]) == []
    assert table.take("k", generation, 0, 2, "second")
    assert table.end_reason("k") == "taken"
    assert not table.take("k", generation, 1, 2, "first")


def test_a_reader_that_never_comes_is_bounded_by_the_lease() -> None:
    clock = ManualClock()
    table, generation = sealed_table(clock, lease_s=10)
    assert table.take("k", generation, 0, 2)
    clock.advance(10)
    table.expire()
    assert table.end_reason("k") == "expired"
    assert not table.take("k", generation, 1, 2)


def test_takes_before_a_reset_count_for_nothing() -> None:
    table, generation = sealed_table(ManualClock())
    assert table.take("k", generation, 0, 2)
    table.reset("k")
    table.insert("k", PART)
    table.seal("k", b"again")
    assert not table.take("k", generation, 1, 2)
    assert table.take("k", generation_of(table), 1, 2)
    assert table.ended(["k"]) == []
    table.drop("k")


def test_a_key_may_have_a_lease_of_its_own_length() -> None:
    clock = ManualClock()
    table = make_table(clock, lease_s=10)
    table.open("k")
    table.seal("k", b"meta", 100)
    table.seal("another", b"meta", 100)
    clock.advance(99)
    table.renew("k")
    clock.advance(99)
    table.expire()
    assert table.ended(["k"]) == []
    clock.advance(1)
    table.expire()
    assert table.end_reason("k") == "expired"


def test_only_a_sealed_key_can_be_taken() -> None:
    table = make_table()
    table.open("k")
    table.insert("k", PART)
    assert not table.take("k", generation_of(table))
    assert not table.take("other", 0)


def test_after_a_drop_no_take_is_acknowledged() -> None:
    table, generation = sealed_table(ManualClock())
    table.drop("k")
    assert not table.take("k", generation)
    assert table.end_reason("k") == "dropped"


def test_after_a_reset_only_the_new_parts_can_be_taken() -> None:
    table = make_table()
    table.open("k")
    table.insert("k", PART)
    old, cursor = generation_of(table), Cursor("k")
    table.next_update(cursor)
    table.reset("k")
    assert table.next_update(cursor) == KeyUpdate(0, cursor.generation)
    assert cursor.generation != old
    table.insert("k", PART)
    table.seal("k", b"")
    assert not table.take("k", old)
    assert table.take("k", cursor.generation)
    table.check()


def test_the_lease_runs_from_the_seal_and_is_renewed() -> None:
    clock = ManualClock()
    table, generation = sealed_table(clock, lease_s=10)
    clock.advance(9)
    table.renew("k")
    clock.advance(9)
    table.expire()
    assert table.ended(["k"]) == []
    clock.advance(1)
    assert not table.take("k", generation), "over at this very moment, though nobody has looked yet"
    assert table.end_reason("k") == "expired"
    table.renew("k")
    assert told(table) == over("expired")


def test_a_key_whose_producer_stands_still_expires() -> None:
    clock = ManualClock()
    table = make_table(clock, unsealed_s=5)
    table.open("k")
    for _ in range(3):
        clock.advance(4)
        assert table.insert("k", PART)
    clock.advance(5)
    table.expire()
    assert not table.insert("k", PART)
    table.seal("k", b"")
    assert table.end_reason("k") == "expired"
    table.check()


def test_bounds_are_looked_at_when_a_key_begins() -> None:
    table = make_table(capacity_bytes=2 * LAYOUT.block_bytes, max_keys=2)
    assert table.open("a")
    assert table.insert("a", PART)
    assert table.insert("a", Part(0, ALL_LAYERS, 2, [6])), "what has begun may grow"
    assert not table.open("b")
    assert told(table, "b") == over("full")
    table.drop("a")
    assert table.open("b")
    assert table.open("c")
    assert not table.open("d"), "two keys at most"
    assert table.statistics()["ended_full"] == 2


def test_bytes_are_counted_by_layer() -> None:
    table = make_table()
    table.open("k")
    table.insert("k", Part(1, 2, 0, [3, 4, 5]))
    expected = 3 * (LAYOUT.span_bytes(1) + LAYOUT.span_bytes(2))
    assert table.statistics()["held_bytes"] == expected
    table.reset("k")
    assert table.statistics()["held_bytes"] == 0


def test_a_release_before_the_beginning_ends_the_key_at_once() -> None:
    table = make_table()
    assert not table.release("k")
    assert table.open("k")
    assert not table.insert("k", PART)
    assert table.end_reason("k") == "released"
    assert table.open("k"), "it held for one beginning"
    table.drop("k")


def test_a_key_that_was_dropped_before_it_began_may_begin_later() -> None:
    table = make_table()
    table.drop("k")
    assert told(table) == over("dropped")
    assert table.open("k")
    assert table.insert("k", PART)
    table.drop("k")
    assert table.end_reason("k") == "dropped"


def test_a_release_is_of_the_request_that_does_not_begin() -> None:
    """Not of another with its name, that comes when the first was dropped."""
    table = make_table()
    table.release("k")
    table.drop("k")
    assert table.open("k")
    assert table.insert("k", PART)
    table.drop("k")


def test_what_is_remembered_has_an_age() -> None:
    clock = ManualClock()
    table = make_table(clock, unsealed_s=300)
    table.release("unwanted")
    table.drop("dropped")
    clock.advance(299)
    table.release("later")
    assert told(table, "dropped") == over("dropped")
    clock.advance(1)
    assert told(table, "dropped") is None
    assert table.open("unwanted")
    assert table.insert("unwanted", PART)
    assert table.open("later")
    assert not table.insert("later", PART)
    table.drop("unwanted")


def test_why_a_key_is_over_is_said_once() -> None:
    table, generation = sealed_table(ManualClock())
    assert table.take("k", generation)
    table.drop("k")
    assert not table.release("k")
    assert told(table) == over("taken")


def test_a_released_key_is_not_taken() -> None:
    table, generation = sealed_table(ManualClock())
    assert table.release("k")
    assert not table.release("k")
    assert not table.take("k", generation)
    assert table.end_reason("k") == "released"


def test_a_take_and_a_drop_never_both_succeed() -> None:
    table, takes = make_table(), set[str]()
    keys = [f"k{index}" for index in range(2000)]
    generations = {}
    for key in keys:
        table.open(key)
        table.seal(key, b"")
        generations[key] = generation_of(table, key)

    def take_all() -> None:
        takes.update(key for key in keys if table.take(key, generations[key]))

    consumer = threading.Thread(target=take_all)
    consumer.start()
    for key in reversed(keys):
        table.drop(key)
    consumer.join()
    assert table.ended(keys) == keys
    ended = {key: table.end_reason(key) for key in keys}
    assert takes == {key for key, reason in ended.items() if reason == "taken"}


def test_what_is_remembered_is_bounded() -> None:
    table = make_table(max_keys=1)
    for index in range(EntryTable.max_ended_keys + 10):
        table.open(f"k{index}")
        table.drop(f"k{index}")
        table.release(f"unknown{index}")
    assert told(table, "k0") is None
    assert told(table, f"k{EntryTable.max_ended_keys}") == over("dropped")


def test_check_names_what_is_left() -> None:
    table, _ = sealed_table(ManualClock())
    with pytest.raises(LeakError, match="k"):
        table.check()
    table.drop("k")


def test_small_parts_are_heard_of_together() -> None:
    table = make_table(gather_bytes=2 * LAYOUT.block_bytes)
    heard: list[str] = []
    table.open("k")
    table.listen(lambda: heard.append("change"))
    block = [Part(0, ALL_LAYERS, index, [index]) for index in range(4)]
    for part, times in zip(block, (0, 1, 1, 2), strict=True):
        table.insert("k", part)
        assert len(heard) == times
    table.insert("k", Part(0, ALL_LAYERS, 4, [9]))
    assert len(heard) == 2
    table.seal("k", b"meta")
    assert len(heard) == 3


def test_listeners_hear_of_changes_and_ends() -> None:
    table = make_table()
    heard: list[str] = []

    def on_change() -> None:
        heard.append("change")

    table.listen(on_change)
    table.on_end = lambda: heard.append("end")
    table.open("k")
    table.insert("k", PART)
    assert heard == ["change", "change"]
    table.drop("k")
    assert heard[-1] == "end"
    table.unlisten(on_change)
    heard.clear()
    table.open("k")
    assert heard == []


@pytest.mark.parametrize("found_by", ["take", "renew", "expire", "over"])
def test_whoever_finds_that_a_lease_is_over_tells_all(found_by: str) -> None:
    clock = ManualClock()
    table, generation = sealed_table(clock, lease_s=10)
    cursor, heard = Cursor("k"), list[str]()
    table.next_update(cursor)
    table.listen(lambda: heard.append("change"))
    table.on_end = lambda: heard.append("end")
    clock.advance(10)
    match found_by:
        case "take":
            assert not table.take("k", generation)
        case "renew":
            table.renew("another")
        case "expire":
            table.expire()
        case "over":
            assert table.ended(["k"]) == ["k"]
            assert table.end_reason("k") == "expired"
    assert heard == ["change", "end"]
    assert table.next_update(cursor) == KeyUpdate(0, generation, end_reason="expired")
    table.renew("k")
    table.expire()
    assert heard[2:] == [], "once"


def test_many_leases_are_renewed_together() -> None:
    clock = ManualClock()
    table = make_table(clock, lease_s=10)
    for key in ("a", "b", "c"):
        table.open(key)
        table.seal(key, b"meta")
    clock.advance(9)
    table.renew("a", "b", "unknown")
    clock.advance(9)
    assert table.ended(["a", "b", "c"]) == ["c"]
    assert table.end_reason("c") == "expired"
