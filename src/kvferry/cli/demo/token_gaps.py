"""Measures on an endpoint how long prompts delay an answer that is being streamed, and plots several such
measurements."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from kvferry.cli.demo.requests import DemoAnswer, DemoPrompt, Endpoint

STREAM_TOKENS = 320
LONG_EVERY = 56
"""Number of tokens of the stream between two long prompts. Each long prompt asks for one token."""

PLOT_ROWS = 4
_MARGIN = 9
_FILLED = {"blocks": " ▁▂▃▄▅▆▇█", "ascii": " ...::::#"}
"""The character for a cell of the plot, by how many eighths of it are filled."""
_ARRIVAL = {"blocks": "▲", "ascii": "^"}

Characters = Literal["blocks", "ascii"]


@dataclass(frozen=True)
class TokenGaps:
    """One endpoint's stream. Times are in seconds since the stream's first token."""

    tokens_s: list[float]
    arrivals_s: list[float]
    """When each long prompt was sent."""
    long_ttfts_s: list[float]
    """Time to first token of each long prompt."""

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return [later - earlier for earlier, later in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    def longest_gaps_s(self, num_columns: int, column_s: float) -> list[float]:
        """For each column of a plot, the longest gap that overlaps it; 0 before and after the stream."""
        longest = [0.0] * num_columns
        for begin, gap in zip(self.tokens_s, self.gaps_s, strict=False):
            for column in range(int(begin / column_s), min(int((begin + gap) / column_s), num_columns - 1) + 1):
                longest[column] = max(longest[column], gap)
        return longest


async def measure_stalls(endpoint: Endpoint, short: DemoPrompt, longs: Sequence[DemoPrompt]) -> TokenGaps:
    """Stream one answer, and send the next long prompt whenever another `LONG_EVERY` tokens of it have arrived."""
    waiting = list(reversed(longs))
    running: list[asyncio.Task[DemoAnswer]] = []
    num_tokens = 0

    def on_token(text: str) -> None:
        nonlocal num_tokens
        num_tokens += 1
        if num_tokens % LONG_EVERY == 0 and waiting:
            running.append(group.create_task(endpoint.ask(waiting.pop(), 1)))

    async with asyncio.TaskGroup() as group:
        stream = await endpoint.ask(short, STREAM_TOKENS, on_token)
    begin, answers = stream.token_times_s[0], [task.result() for task in running]
    return TokenGaps(
        [time - begin for time in stream.token_times_s],
        [answer.asked_s - begin for answer in answers],
        [answer.token_times_s[0] - answer.asked_s for answer in answers],
    )


def draw_stalls(measured: Mapping[str, TokenGaps], width: int, characters: Characters) -> Iterator[Text]:
    """Plot the gaps of each stream over time in lines of at most `width` characters. All streams have the same linear
    scales."""
    num_columns = max(width - _MARGIN, 10)
    column_s = max(stalls.tokens_s[-1] for stalls in measured.values()) / num_columns
    top_s = max(max(stalls.gaps_s) for stalls in measured.values())
    filled, arrival = _FILLED[characters], _ARRIVAL[characters]
    for name, stalls in measured.items():
        yield Text(name, style="bold")
        eighths = [
            max(1, round(gap / top_s * PLOT_ROWS * 8)) if gap else 0
            for gap in stalls.longest_gaps_s(num_columns, column_s)
        ]
        for row in reversed(range(PLOT_ROWS)):
            label = f"{top_s * 1e3:.0f} ms" if row == PLOT_ROWS - 1 else ""
            line = Text(f"{label:>{_MARGIN - 1}} ")
            for height in eighths:
                level = min(max(height - row * 8, 0), 8)
                line.append(filled[level], style="red" if height > 8 else "green")
            line.rstrip()
            yield line
        columns = {min(int(at / column_s), num_columns - 1) for at in stalls.arrivals_s}
        marks = "".join(arrival if column in columns else " " for column in range(num_columns))
        yield Text(f"{'':{_MARGIN}}{marks.rstrip()}", style="yellow")
    seconds = f"{column_s * num_columns:.1f} s"
    yield Text(f"{'':{_MARGIN}}0 s{seconds:>{num_columns - 3}}", style="dim")
    yield Text(f"{'':{_MARGIN}}{arrival} a long prompt arrives", style="yellow")


def verdict(disaggregated: TokenGaps, plain: TokenGaps) -> tuple[str, bool]:
    """The result of both streams in a sentence or two, and True if the first had the shorter longest gap."""
    split, whole = max(disaggregated.gaps_s) * 1e3, max(plain.gaps_s) * 1e3
    usual = statistics.median(disaggregated.gaps_s) * 1e3, statistics.median(plain.gaps_s) * 1e3
    figures = (
        f"Longest gap between two tokens: {split:.0f} ms on P/D, {whole:.0f} ms on the plain instance"
        f" (median {usual[0]:.1f} and {usual[1]:.1f} ms)."
    )
    waits = [statistics.median(stalls.long_ttfts_s) * 1e3 for stalls in (disaggregated, plain) if stalls.long_ttfts_s]
    if len(waits) == 2:
        figures += f" The price: the long prompts' first token comes after {waits[0]:.0f} ms instead of {waits[1]:.0f}."
    if split < whole:
        return figures, True
    return f"{figures} Here and now prefill disturbed the stream on P/D as much: do both share a core?", False
