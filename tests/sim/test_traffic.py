from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival, TracePrompt, faster, part_of, read_traffic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.0319600,3180,0
2023-11-17 00:00:02,7,8"""
MOONCAKE = '{"timestamp": 500, "input_length": 600, "output_length": 6, "hash_ids": [4, 9]}\n'


def _written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azures_format(tmp_path: Path) -> None:
    first, second, third = read_traffic(_written(tmp_path, AZURE))
    assert (first.at_s, first.prompt_tokens, first.answer_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(0.052, abs=1e-6)
    assert second.answer_tokens == 1  # every answer has a token
    assert third.at_s == pytest.approx(2.02004, abs=1e-6)


def test_azures_format_of_2024(tmp_path: Path) -> None:
    text = AZURE.replace("23:59:59.9799600", "23:59:59.979960+00:00").replace("00:00:02", "00:00:02+00:00")
    assert read_traffic(_written(tmp_path, text)) == read_traffic(_written(tmp_path, AZURE))


@pytest.mark.parametrize("text", [AZURE, MOONCAKE])
def test_what_other_programs_write_before_and_between_lines(text: str, tmp_path: Path) -> None:
    plain = read_traffic(_written(tmp_path, text))
    for changed in (f"\ufeff{text}", text.replace("\n", "\r\n"), f"\ufeff\n\n{text}" if text is MOONCAKE else text):
        (tmp_path / "trace").write_bytes(changed.encode())
        assert read_traffic(tmp_path / "trace") == plain


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    for content in (gzip.compress(MOONCAKE.encode()), AZURE.encode("utf-16")):
        (tmp_path / "trace").write_bytes(content)
        with pytest.raises(ConfigError, match="no text in UTF-8; a compressed one has to be decompressed"):
            read_traffic(tmp_path / "trace")


def test_a_trace_that_can_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="it must be a file, as it is read twice"):
            read_traffic(path)


def test_mooncakes_format_begins_at_its_first_request(tmp_path: Path) -> None:
    later = MOONCAKE.replace("500", "1750")
    assert read_traffic(_written(tmp_path, MOONCAKE + later)) == [
        Arrival(0.0, 600, 6, (4, 9)),
        Arrival(1.25, 600, 6, (4, 9)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (AZURE.replace("ContextTokens", "ContextToken"), "did you mean 'ContextTokens'"),
        (AZURE.replace("4808,10", "4808"), "line 2: 2 columns"),
        (AZURE.replace("4808", "many"), "line 2: ContextTokens is 'many'"),
        (AZURE.replace("4808", "0"), "line 2: a prompt of 0 tokens"),
        (AZURE.replace(",10", ",-1"), "line 2: an answer of -1 tokens"),
        (AZURE.replace("23:59:59.9799600", "noon"), "line 2: '2023-11-16 noon' is not a time"),
        (AZURE.replace("2023-11-16", "2024-11-16"), "line 3: .* sort the trace"),
        (MOONCAKE.replace("[4, 9]", "[4]"), "1 hash_ids for 600 tokens, which are 2 blocks"),
        (MOONCAKE.replace("input_length", "input"), "line 1: .*input_length"),
        (MOONCAKE + AZURE, "line 2"),
    ],
)
def test_what_is_wrong_with_a_trace(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_traffic(_written(tmp_path, text))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*No such file"):
        read_traffic(tmp_path / "none")


def test_parts_of_a_trace() -> None:
    arrivals = [Arrival(float(second), 10, 10) for second in range(10)]
    part = part_of(arrivals, from_s=3, until_s=6)
    assert [one.at_s for one in part] == [0.0, 1.0, 2.0]
    assert [one.at_s for one in faster(part, 4)] == [0.0, 0.25, 0.5]
    with pytest.raises(ConfigError, match="no request from 20 s on; the last one is at"):
        part_of(arrivals, from_s=20)


def test_prompts_share_the_blocks_that_the_trace_says_they_share() -> None:
    one, other = (
        TracePrompt(Arrival(0, 1100, 1, ids), number, 7, 4096) for number, ids in enumerate([(5, 6, 7), (5, 6, 8)])
    )
    assert len(list(one)) == len(one) == 1100
    assert one[: 2 * BLOCK_TOKENS] == other[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS :] != other[2 * BLOCK_TOKENS :]
    tokens = list(one)
    assert [one[500:530], one[-1], one[::3]] == [tokens[500:530], tokens[-1], tokens[::3]]
    with pytest.raises(IndexError):
        one[1100]


def test_prompts_without_named_blocks_share_nothing() -> None:
    one, again, other = (TracePrompt(Arrival(0, 40, 1), number, 7, 4096) for number in (1, 1, 2))
    assert list(one) == list(again)
    assert list(one)[:8] != list(other)[:8]
    assert list(TracePrompt(Arrival(0, 40, 1), 1, 8, 4096))[:8] != list(one)[:8]  # another seed


def test_a_long_trace_is_in_memory_once(tmp_path: Path) -> None:
    path = _written(tmp_path, "".join(MOONCAKE.splitlines(keepends=True)[0] for _ in range(5000)))
    tracemalloc.start()
    try:
        found = faster(part_of(read_traffic(path)), 1.0)
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 5000
    assert most < 1.3 * now
