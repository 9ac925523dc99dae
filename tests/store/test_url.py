"""Addresses of stores, read strictly."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError
from kvferry.store.media.valkey_client import ValkeyOptions
from kvferry.store.table import BUILTIN, find_store, find_stores, parse_store_url, read_options


def test_what_an_address_says() -> None:
    spec = find_store("file:/var/kv?max_bytes=2GiB&eviction=s3fifo&fsync=true")
    assert (spec.url.location, spec.options.max_bytes, spec.options.fsync) == ("/var/kv", 2**31, True)  # type: ignore[attr-defined]
    assert find_store("memory:1.5GiB?name=x").url.location == "1.5GiB"
    assert find_store("third_party_store:DictStore").kind.__name__ == "DictStore"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("flie:/x", "did you mean 'file:'"),
        ("vakley://host", "did you mean 'valkey:'"),
        ("/just/a/path", "is not a URL"),
        ("memory:", "needs a size"),
        ("memory:lots", "is not a size"),
        ("memory:1GiB?evicton=lru", "did you mean 'eviction'"),
        ("memory:1GiB?eviction=lruu", "did you mean 'lru'"),
        ("memory:1GiB?codec=nonne", "did you mean 'none'"),
        ("memory:1GiB?name", "written as"),
        ("memory:1GiB?name=a&name=b", "twice"),
        ("memory:1GiB?deadline_s=0", "greater than 0"),
        ("file:", "give a directory"),
        ("file:/etc/hosts", "not a directory"),
        ("file:/x?max_bytes=0", "greater than 0"),
        ("file:/x?max_bytes=-1", "is not a size"),
        ("file:/x?access=world", "access"),
        ("valkey:host", "a server is named as"),
        ("unix://:secret@/run/valkey.sock", "the URL names no host"),
        ("valkey://host:port", "store"),
        ("valkey://host?tls_ca=/x", "valkeys://"),
        ("valkey://host?password_file=/no/such", "password_file: /no/such: No such file"),
        ("no_such_module.at_all:Store", "cannot import"),
        ("kvferry.core.errors:ConfigError", "must be a kvferry KVStore"),
    ],
)
def test_what_is_wrong_is_told(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_store(url)


def test_a_list_is_bounded() -> None:
    for urls in ([], ["memory:1GiB"] * 9):
        with pytest.raises(ConfigError, match="1 to 8"):
            find_stores(urls)


def test_no_password_is_shown() -> None:
    for url in ("valkey://user:geheim@host:1/0?nonsense=1", "vakley://user:geheim@host:1/0", "memory:x@geheim?b"):
        with pytest.raises(ConfigError) as found:
            find_store(url)
        assert "user:geheim" not in str(found.value)


@given(st.text(max_size=80))
def test_nothing_else_is_raised(text: str) -> None:
    for head in ("", "memory:", "file:/", "valkey://", "file:/x?"):
        try:
            url = parse_store_url(head + text, frozenset(BUILTIN))
            read_options(url, ValkeyOptions)
        except ConfigError:
            pass


class Region(msgspec.Struct, frozen=True, kw_only=True):
    region: str
    copies: int = 1

    def __post_init__(self) -> None:
        if self.region != "eu":
            raise ValueError("region must be eu")


def test_options_of_another_package_are_checked_as_it_says() -> None:
    assert read_options(parse_store_url("x:y?region=eu&copies=2", ["x"]), Region) == Region(region="eu", copies=2)
    with pytest.raises(ConfigError, match="missing required field `region`"):
        read_options(parse_store_url("x:y?copies=2", ["x"]), Region)
    with pytest.raises(ConfigError, match="region must be eu"):
        read_options(parse_store_url("x:y?region=us", ["x"]), Region)
