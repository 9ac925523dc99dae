from kvferry.core.ordered_set import OrderedSet


def test_members_keep_their_order() -> None:
    members = OrderedSet(["c", "a", "b"])
    members.add("a")
    members.discard("c")
    members.discard("c")
    members.add("c")
    assert list(members) == ["a", "b", "c"]
    assert list(members - {"b"}) == ["a", "c"]
    assert ("b" in members, "d" in members, len(members)) == (True, False, 3)
