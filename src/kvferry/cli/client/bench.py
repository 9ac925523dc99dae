"""`kvferry bench`: load a server, and report the time to the first token, the times between tokens, and the goodput."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.cli import completion
from kvferry.cli.client.load import AGGREGATED, LoadResult, OpenLoop, RequestOutcome, poisson
from kvferry.cli.client.stream import OpenAIClient
from kvferry.cli.client.talk import choose_model
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import Bounds
from kvferry.core.settings.units import percent
from kvferry.sim.targets import Targets, parse_targets
from kvferry.sim.traffic import faster, part_of, read_traffic

RATE, SECONDS, TOKENS, SEED = Bounds(0.001, 10_000), Bounds(1, 86_400), Bounds(1, 2**20), Bounds(0, 2**32)
_SPLIT, _AGGREGATED = "as it is", "aggregated"


def bench(
    url: Annotated[
        str,
        Parameter(help="URL of a server with OpenAI's API: kvferry's, vLLM's, any.", completer=completion.urls),
    ],
    *,
    rate: Annotated[float, Parameter(help="Requests a second, at random times.")] = 1.0,
    for_s: Annotated[float, Parameter(help="Seconds in which requests are sent.")] = 30.0,
    prompt_tokens: Annotated[int, Parameter(help="Tokens of a prompt.")] = 512,
    answer_tokens: Annotated[int, Parameter(help="Tokens of an answer.")] = 64,
    trace: Annotated[
        Path | None, Parameter(help="Send the requests of this trace (Mooncake's or Azure's format) at their times.")
    ] = None,
    speed: Annotated[float, Parameter(help="Send a trace this many times as fast.")] = 1.0,
    slo: Annotated[str, Parameter(help="Targets, as of `kvferry why`.")] = "ttft=2s,itl=50ms",
    compare: Annotated[
        bool, Parameter(help="Send all of it again to one decode instance each, without hand-offs.", negative=())
    ] = False,
    model: Annotated[str | None, Parameter(help="Name of the model. Default: the server's first.")] = None,
    seed: Annotated[int, Parameter(help="Of the times and of the prompts' tokens.")] = 1,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
    plot: Annotated[
        Path | None, Parameter(help="Also draw the distributions, as PNG or SVG; needs kvferry[plot].")
    ] = None,
    api_key: Annotated[str | None, Parameter(help="API key of the server, if it has one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a server at https://.")] = None,
) -> int:
    r"""Load a server in an open loop: each request is sent at its time, whether or not earlier requests have been
    answered.

    Random prompts of one length, and the same number again without hand-offs:

        kvferry bench http://127.0.0.1:8000 --rate 2 \
          --prompt-tokens 1024 --compare

    Goodput is the number of answers a second within the targets. Exit code 1: a request failed.
    """
    RATE.require("--rate", rate)
    SECONDS.require("--for-s", for_s)
    TOKENS.require("--prompt-tokens", prompt_tokens)
    TOKENS.require("--answer-tokens", answer_tokens)
    RATE.require("--speed", speed)
    SEED.require("--seed", seed)
    targets = parse_targets(slo)
    if trace is None:
        arrivals = poisson(rate, for_s, prompt_tokens, answer_tokens, seed)
    else:
        arrivals = part_of(faster(read_traffic(trace), speed), until_s=for_s)
    passes = {_SPLIT: [], _AGGREGATED: AGGREGATED} if compare else {_SPLIT: []}

    async def run() -> dict[str, LoadResult]:
        async with OpenAIClient(url, api_key=api_key, tls_ca=tls_ca) as client:
            served = await choose_model(client, model)
            results = {}
            for number, (name, headers) in enumerate(passes.items()):
                load = OpenLoop(
                    client, served, seed + number
                )  # other prompts, because the KV of the first ones is in caches
                await load.prepare()
                with _Progress(name, len(arrivals)) as progress:
                    results[name] = await load.run(arrivals, headers, progress.done)
            return results

    results = run_async(run())
    figures = {name: result.figures(targets) for name, result in results.items()}
    if json:
        sys.stdout.buffer.write(msgspec.json.encode({"url": url, "slo": str(targets), "results": figures}) + b"\n")
    else:
        sys.stdout.write("\n".join(table(figures, targets)) + "\n")
        for error in dict.fromkeys(sent.error for result in results.values() for sent in result.sent if sent.error):
            sys.stdout.write(f"  failed: {error[:200]}\n")
    if plot is not None:
        draw(results, plot)
    return 1 if any(figure["failed"] for figure in figures.values()) else 0


def table(figures: Mapping[str, Mapping[str, Any]], targets: Targets) -> list[str]:
    """The results in lines of at most 80 characters, with a column for each pass."""

    def times(name: str, point: str) -> list[str]:
        parts = [figure[name] for figure in figures.values()]
        return ["–" if part is None else _milliseconds(part[point]) for part in parts]

    def values(name: str, form: str) -> list[str]:
        return [format(figure[name], form) for figure in figures.values()]

    rows: list[tuple[str, Sequence[str]]] = [
        ("", list(figures)),
        ("requests", [f"{figure['requests']} ({figure['failed']} failed)" for figure in figures.values()]),
        ("requests a second", values("request_rate", ".2f")),
        ("tokens a second in", values("input_tokens_per_s", ".0f")),
        ("tokens a second out", values("output_tokens_per_s", ".1f")),
        *((f"TTFT {point}", times("ttft_ms", point)) for point in ("p50", "p90", "p99")),
        *((f"gap between tokens {point}", times("itl_ms", point)) for point in ("p50", "p99", "max")),
        (f"within {targets}", [f"{percent(figure['within_targets'])} %" for figure in figures.values()]),
        ("goodput (requests a second)", values("goodput", ".2f")),
    ]
    lines = [f"{name:<32}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in rows]
    late_ms = max(figure["longest_delay_ms"] for figure in figures.values())
    if late_ms > 100:
        lines.append(f"Requests were sent up to {late_ms:.0f} ms late: this machine is too busy to load the server.")
    return [line.rstrip() for line in lines]


def draw(results: Mapping[str, LoadResult], path: Path) -> None:
    """Plot the share of times to first token, and of times between tokens, that exceed each number of ms. Raises
    `ConfigError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'kvferry[plot]'") from error
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title in ((left, "time to first token"), (right, "time between two tokens")):
        for name, result in results.items():
            replies = result.answered
            seconds = (
                [reply.ttft_s or 0.0 for reply in replies]
                if axes is left
                else [gap for reply in replies for gap in reply.gaps_s]
            )
            ordered = sorted(1000 * value for value in seconds)
            if ordered:
                axes.plot(ordered, [1 - index / len(ordered) for index in range(len(ordered))], label=name)
        axes.set(title=title, xlabel="ms", ylabel="share that is longer", ylim=(0, 1))
        axes.set_xlim(left=0)
    left.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


class _Progress:
    """Shows how many requests have ended: a bar on a terminal, otherwise a line every few seconds."""

    line_s = 5.0
    """Seconds between two lines of progress if standard error is not a terminal."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._count = name, total, 0
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(name, total=total)
        self._is_terminal, self._shown_at = console.is_terminal, SYSTEM_CLOCK.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def done(self, sent: RequestOutcome) -> None:
        """One more has ended."""
        self._count += 1
        self._bar.advance(self._task)
        now = SYSTEM_CLOCK.monotonic()
        if not self._is_terminal and now - self._shown_at >= self.line_s:
            self._shown_at = now
            sys.stderr.write(f"{self._name}: {self._count} of {self._total}\n")


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
