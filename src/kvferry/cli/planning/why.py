"""`kvferry why URL`: says if disaggregation is worthwhile for the traffic of a running fleet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.fleet.command import ask
from kvferry.cli.router_address import RouterAddress
from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import TRAFFIC_PATH, TrafficReport
from kvferry.core.settings.bounds import Bounds
from kvferry.core.settings.units import percent
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import Counts
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.fleet.scaling.verdict import MIN_REQUESTS, Arrangement, Verdict, judge
from kvferry.http.client.origin import Origin
from kvferry.sim.targets import parse_targets

SHARE = Bounds(0, 1, above=True)
SECONDS = Bounds(1, 86_400)


class _Facts(msgspec.Struct):
    num_kv_tokens: int = 0
    max_num_seqs: int = 0


class _Used(msgspec.Struct):
    role: str
    alive: bool
    facts: _Facts | None = None


class _AllUsed(msgspec.Struct):
    instances: list[_Used]


def why(
    url: Annotated[str, Parameter(help="URL of the fleet's router, such as http://127.0.0.1:8000.")],
    *,
    slo: Annotated[
        str, Parameter(help="Targets: time to the first token, and mean time between two tokens of an answer.")
    ] = "ttft=2s,itl=50ms",
    goal: Annotated[float, Parameter(help="Share of requests that is to be within the targets.")] = 0.99,
    seconds: Annotated[
        int, Parameter(help="Look at the requests of this many seconds, as far as the router remembers.")
    ] = 600,
    admin_key: Annotated[str | None, Parameter(help="Admin key of the router, if it has one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a router at https://.")] = None,
) -> int:
    """Say whether a running fleet should disaggregate: from its own measurements of the last minutes.

        kvferry why http://127.0.0.1:8000 --slo ttft=1s,itl=40ms

    Compares P and D with the same number of instances for both phases, for the requests that arrived and the measured
    times of their phases. The deployment that does not run is predicted, within some percentage points.
    """
    SHARE.require("--goal", goal)
    SECONDS.require("--seconds", seconds)
    targets = parse_targets(slo)
    if targets.ttft is None or targets.itl is None or targets.e2e is not None:
        raise ConfigError("--slo: give ttft and itl, as in ttft=2s,itl=50ms")
    Origin.parse(url, "URL")
    router = RouterAddress(router=url, admin_key=admin_key, tls_ca=tls_ca)
    used = [instance for instance in ask(router, "GET", "/kvferry/instances", _AllUsed).instances if instance.alive]
    report = ask(router, "GET", f"{TRAFFIC_PATH}?seconds={seconds}", TrafficReport)
    counts = Counts(
        sum(instance.role == "prefill" for instance in used), sum(instance.role == "decode" for instance in used)
    )
    facts = [instance.facts for instance in used if instance.role == "decode" and instance.facts is not None]
    room = DecodeCapacity.smallest((instance.num_kv_tokens, instance.max_num_seqs) for instance in facts)
    verdict = judge(report, counts, LatencyTargets(targets.ttft, targets.itl), goal, room)
    if verdict is None:
        done = sum(instance.state == "done" for instance in report.requests)
        raise ConfigError(
            f"too little is known: {done} requests have ended in the last {seconds} s, and it takes {MIN_REQUESTS},"
            " with streamed answers among them; ask again when there was more traffic"
        )
    for line in _lines(verdict):
        sys.stdout.write(line + "\n")
    return 0


def _lines(verdict: Verdict) -> list[str]:
    workload, times, stall = verdict.workload, verdict.times, verdict.stall_s
    measured = "" if verdict.measured is None else f"; measured: {percent(verdict.measured)} % within the targets"
    lines = [
        f"{verdict.num_requests} requests, {workload.rate:.2f} a second, prompts of {workload.prompt_tokens.mean():.0f}"
        f" tokens to compute, answers of {workload.output_tokens.mean() + 1:.0f}{measured}",
        f"prefill {1000 * times.prefill_base_s:.1f} ms + {1000 * times.prefill_token_s:.3f} ms a token; a decode step"
        f" {1000 * times.decode_base_s:.1f} ms + {1000 * times.decode_sequence_s:.2f} ms an answer",
        f"on one instance, a prompt stops the answers beside it for {1000 * stall[0]:.0f} ms, one in a hundred for"
        f" {1000 * stall[1]:.0f} ms",
        f"{'':<24} {'within both':>12} {'TTFT':>8} {'ITL':>8} {'busiest':>8}",
        _row("as it is", verdict.now),
        *([] if verdict.split is None else [_row("the best with P and D", verdict.split)]),
        _row("for both phases", verdict.aggregated),
    ]
    for label, smallest in (("P and D", verdict.smallest_split), ("for both phases", verdict.smallest_aggregated)):
        enough = f"{smallest.counts}" if smallest is not None else f"not with {verdict.max_tried} instances"
        lines.append(f"for {100 * verdict.goal:g} %, {label}: {enough}")
    return [*lines, "", verdict.sentence()]


def _row(label: str, form: Arrangement) -> str:
    expected = form.expected
    figures = f"{percent(expected.attained):>10} % {percent(expected.ttft):>6} % {percent(expected.itl):>6} %"
    return f"{label:<24} {figures} {100 * min(expected.busiest, 9.99):>6.0f} %  {form.counts}"
