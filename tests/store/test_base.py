"""Names of the store's interface that stores of other packages may still use."""

from kvferry.store import base
from kvferry.store.table import find_store


def test_deprecated_names_hold() -> None:
    kind = find_store("third_party_store:DictStore").kind

    class OldStore(kind):  # type: ignore[misc, valid-type]
        ends_calls = True

    class Derived(OldStore):
        pass

    assert OldStore.cancels_at_once
    assert Derived.cancels_at_once
    assert not kind.cancels_at_once
    assert (base.Put.STORED, base.Read) == (base.PutResult.STORED, base.BlockRead)
