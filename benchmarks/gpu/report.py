"""The report of a run: Markdown for people, and one JSON file that can be committed as the results of a card."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import report as benchmark
from gpu.card import Card
from gpu.context import ROOT
from gpu.costs import describe_costs
from gpu.plan import Step
from gpu.records import Check, Figure, Note
from gpu.runner import Outcome, State

RESULTS = Path(__file__).parent / "results"


class Run(msgspec.Struct, frozen=True):
    """One run of `make gpu`. `fake`: without a GPU; its figures say nothing."""

    date: str
    commit: str
    fake: bool
    cards: list[Card]
    machine: dict[str, Any]
    outcomes: list[Outcome]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        records = (record for outcome in self.outcomes for record in outcome.records)
        return {record.name: record for record in records if isinstance(record, Figure)}


def make_run(cards: Sequence[Card], outcomes: Sequence[Outcome], *, fake: bool) -> Run:
    """A run that ends now."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Run(date, _commit(), fake, list(cards), benchmark.machine(), list(outcomes))


def _commit() -> str:
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def committed(card: Card, results: Path = RESULTS) -> Run | None:
    """The last committed results of a card of this name."""
    path = results / f"{card.slug}.json"
    return msgspec.json.decode(path.read_bytes(), type=Run) if path.exists() else None


def write(run: Run, steps: Sequence[Step], folder: Path, results: Path = RESULTS) -> Path:
    """Write `report.md` and `report.json`; returns the path of the former. `results`: folder of committed results."""
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    path = folder / "report.md"
    has_picture = (folder / "picture.svg").exists()
    path.write_text("\n".join(_lines(run, steps, committed(run.cards[0], results), has_picture)) + "\n")
    return path


def _lines(run: Run, steps: Sequence[Step], last: Run | None, has_picture: bool) -> Iterable[str]:
    card = run.cards[0]
    yield f"# kvferry on {len(run.cards)} × {card.name}" if len(run.cards) > 1 else f"# kvferry on {card.name}"
    yield ""
    if run.fake:
        yield "**Without a GPU: the figures are those of a CPU and of stand-ins, and say nothing.**\n"
    versions = ", ".join(f"{name} {run.machine[name]}" for name in ("kvferry", "torch", "vllm") if run.machine[name])
    yield f"{run.date}, commit {run.commit or 'unknown'}, driver {card.driver}, {versions}, {run.machine['cpu']}."
    yield ""
    yield from _summary(run, steps)
    for outcome in run.outcomes:
        yield from _section(outcome, last)
    if has_picture:
        yield "\n![Share of gaps between tokens by their length](picture.svg)"
    yield "\n## What costs time in kvferry's code\n"
    yield from (f"- {line}" for line in describe_costs(run.figures))


def _summary(run: Run, steps: Sequence[Step]) -> Iterable[str]:
    questions = {step.name: step.question for step in steps}
    yield "| step | question | seconds | result |"
    yield "|---|---|---|---|"
    for outcome in run.outcomes:
        line = f": {_cell(outcome.line)}" if outcome.line else ""
        yield _row(
            outcome.step, questions.get(outcome.step, ""), f"{outcome.seconds:.0f}", f"**{outcome.state}**{line}"
        )


def _section(outcome: Outcome, last: Run | None) -> Iterable[str]:
    yield f"\n## {outcome.step}\n"
    yield from (f"{record.text}\n" for record in outcome.records if isinstance(record, Note))
    checks = [record for record in outcome.records if isinstance(record, Check)]
    if checks:
        yield f"{sum(check.held for check in checks)} of {len(checks)} checks hold.\n"
        yield from (f"- **{check.name}: no.** {check.detail}" for check in checks if not check.held)
    figures = [record for record in outcome.records if isinstance(record, Figure)]
    if figures:
        yield from _table(figures, last)


def _table(figures: Sequence[Figure], last: Run | None) -> Iterable[str]:
    before = {} if last is None else last.figures
    date = "" if last is None else f" of {last.date}"
    yield f"| | value | baseline | ratio | goal | last committed{date} |"
    yield "|---|---|---|---|---|---|"
    for figure in figures:
        value, baseline = f"{_number(figure.value)} {figure.unit}", ""
        if figure.baseline_value is not None:
            baseline = f"{figure.baseline}, {_number(figure.baseline_value)}"
        goal = ""
        if figure.goal is not None and figure.ratio is not None:
            goal = f"{figure.goal:g} {'reached' if figure.ratio >= figure.goal else 'missed'}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        earlier = _earlier(before.get(figure.name))
        yield _row(_cell(figure.name), value, baseline, ratio, goal, earlier)


def _earlier(figure: Figure | None) -> str:
    if figure is None:
        return ""
    ratio = "" if figure.ratio is None else f" ({figure.ratio:.2f})"
    return f"{_number(figure.value)}{ratio}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A text that does not end a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def summary_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each step that did not hold."""
    return [f"{outcome.step}: {outcome.state}: {outcome.line}" for outcome in outcomes if outcome.state != State.HELD]
