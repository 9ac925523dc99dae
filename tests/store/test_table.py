"""Stores by URL, and lists of them."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.store.table import (
    MAX_TIERS,
    find_store,
    find_stores,
    hand_off_paths,
    lossy_codecs,
    stored_layout,
)
from kvferry.testing.stores import LAYOUT

FILE = "file:/kv"


def test_a_store_says_what_it_can_do() -> None:
    file, memory = find_store(FILE), find_store("memory:1GiB")
    assert file.is_shared
    assert memory.is_shared
    assert not find_store(FILE + "?max_bytes=1GiB&eviction=lru").uses_finishes
    assert find_store(FILE + "?max_bytes=1GiB&eviction=reuse").uses_finishes


def test_one_url_or_a_list_is_tiers() -> None:
    assert [spec.url.scheme for spec in find_stores(FILE)] == ["file"]
    assert [spec.url.scheme for spec in find_stores(["memory:1GiB", FILE])] == ["memory", "file"]


@pytest.mark.parametrize("urls", [[], [FILE] * (MAX_TIERS + 1)])
def test_no_tiers_and_too_many_are_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="give a URL, or a list of 1 to 8"):
        find_stores(urls)


@pytest.mark.parametrize(
    ("url", "says"),
    [("file:/kv?codec=losless", "lossless"), ("file:/kv?eviction=lur&max_bytes=1GiB", "lru")],
)
def test_an_unknown_name_gets_the_nearest(url: str, says: str) -> None:
    with pytest.raises(UnknownName, match=says):
        find_store(url)


def test_an_unknown_scheme_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'file:'"):
        find_store("flie:/kv")


def test_lossy_codecs_set_a_layout_apart() -> None:
    exact, lossy = find_stores([FILE, "file:/b?codec=lossless"]), find_stores([FILE, "file:/b?codec=int4"])
    assert lossy_codecs(exact) == []
    assert lossy_codecs(lossy) == ["int4"]
    assert stored_layout(exact, LAYOUT) is LAYOUT
    assert stored_layout(lossy, LAYOUT).fingerprint() != LAYOUT.fingerprint()


def test_instances_share_what_has_the_same_path() -> None:
    assert hand_off_paths(find_stores(FILE), LAYOUT) == hand_off_paths(find_stores(["memory:1GiB", FILE]), LAYOUT)[-1:]
    assert hand_off_paths(find_stores(FILE), LAYOUT) != hand_off_paths(find_stores(FILE + "?codec=lossless"), LAYOUT)
