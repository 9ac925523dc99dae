from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.sim.traffic import read_traffic
from kvferry.store.trace.records import TraceRequest, read_trace, write_trace

LINE = b'{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_what_is_written_is_read(tmp_path: Path) -> None:
    requests = [TraceRequest(number, 600, 3, [0, number]) for number in range(5)]
    write_trace(tmp_path / "trace.jsonl", iter(requests))
    assert list(read_trace(tmp_path / "trace.jsonl")) == requests


def test_a_field_more_is_no_harm_and_bytes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(LINE + b"\n" + LINE.replace(b"}", b', "session": "a"}'))
    heard: list[int] = []
    assert [request.arrived_s for request in read_trace(path, heard.append)] == [27.482, 27.482]
    assert sum(heard) == path.stat().st_size


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (b"{", "line 2: Input data was truncated"),
        (b"[1, 2]", "line 2: Expected `object`"),
        (b"\xff\xfe", "line 2: JSON is malformed"),
        (LINE.replace(b"1000", b"-1"), r"line 2: Expected `int` >= 0 - at `\$.input_length`"),
        (LINE.replace(b"1000", b"1e400"), "line 2"),
        (LINE.replace(b"47]", b'"x"]'), r"line 2: Expected `int`, got `str` - at `\$.hash_ids"),
        (LINE.replace(b', "hash_ids": [46, 47]', b""), "line 2: .*`hash_ids`"),
        (LINE.replace(b"27482", b"27481"), "line 2: timestamp 27481 comes after 27482"),
        (LINE.replace(b"27482", b"NaN"), "line 2"),
        (b"[" * 100_000, "line 2"),
        (b'{"a": ' * 100_000, "line 2: maximum recursion depth exceeded"),
        (b"1" * 2**20, "line 2: longer than 999999 bytes"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, second: bytes, what: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(LINE + second)
    with pytest.raises(ConfigError, match=what):
        list(read_trace(path, max_line_bytes=999_999))


@pytest.mark.parametrize("text", ['[{"timestamp": 0}]', "[\n{}\n]"])
def test_a_json_array_is_named_as_such(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a JSON array, instead of one object in each line; .* jq -c '\.\[\]'"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="a JSON array"):
        read_traffic(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "none"))
