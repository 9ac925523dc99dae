"""`python -m hunts SEED …`, or `FIRST-LAST`: run the scenarios of these seeds, and print the violations."""

from __future__ import annotations

import argparse
import os
import sys

from hunts.fleet_scenario import draw_fleet
from hunts.hunt import AnyScenario, ScenarioKind, hunt, run_any, shrink
from hunts.scenario import Report, draw
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.runtime.process_exit import exit_process
from kvferry.core.runtime.streams import OutputError, prepare_streams

_MAX_VIOLATIONS = 6
_FEW_SEEDS = 8
_MAX_SEEDS = 10**7
_MAX_CHARACTERS = 1500


def main(arguments: list[str]) -> int:
    """Returns 1 if there were violations."""
    parser = argparse.ArgumentParser(prog="python -m hunts", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=_range, help="seeds, or ranges such as 1-200")
    parser.add_argument("--no-faults", action="store_true", help="nothing breaks")
    parser.add_argument("--fleet", action="store_true", help="of a fleet that a controller looks after")
    parser.add_argument("--log", action="store_true", help="print all events")
    parser.add_argument("--jobs", type=_count, default=1, help="processes")
    parser.add_argument("--twice", type=_count, default=0, metavar="N", help="run each Nth seed twice, and compare")
    parser.add_argument("--shrink", action="store_true", help="find the few requests and faults with which it fails")
    parser.add_argument("--requests", type=_numbers, help="only these of the seed's, such as 0,3, or none")
    parser.add_argument("--faults", type=_numbers, help="only these of the seed's, such as 0,3, or none")
    options = parser.parse_args(arguments)
    if sum(seed_range.stop - seed_range.start for seed_range in options.seeds) > _MAX_SEEDS:
        parser.error(f"more than {_MAX_SEEDS} seeds at once")
    seeds = [seed for seed_range in options.seeds for seed in seed_range]
    begun, num_failed = SYSTEM_CLOCK.monotonic(), 0
    if options.shrink or options.log or options.requests is not None or options.faults is not None:
        for seed in seeds:
            drawn = draw_fleet(seed) if options.fleet else draw(seed, with_faults=not options.no_faults)
            try:
                scenario = _part(drawn, options.requests, options.faults)
            except IndexError:
                had = f"{len(drawn.requests)} requests and {len(drawn.faults)} faults"
                parser.error(f"seed {seed} has {had}, which are counted from 0")
            if options.shrink:
                num_failed += _shrink(scenario)
            else:
                num_failed += _print_report(run_any(scenario, keep_log=options.log), log=options.log)
    else:
        kind: ScenarioKind = "fleet" if options.fleet else "unharmed" if options.no_faults else "deployment"
        for report in hunt(seeds, jobs=options.jobs, twice_every=options.twice, kind=kind):
            num_failed += _print_report(report, always=len(seeds) <= _FEW_SEEDS)
            if report.violations:
                flag = {"deployment": "", "unharmed": " --no-faults", "fleet": " --fleet"}[kind]
                sys.stdout.write(f"  to shrink it: python -m hunts {report.seed}{flag} --shrink\n")
    wall_s, cpu_s = SYSTEM_CLOCK.monotonic() - begun, sum(os.times()[:4])
    sys.stdout.write(f"{len(seeds)} seeds, {num_failed} failed, {wall_s:.1f} s, {cpu_s:.1f} s of CPU time\n")
    return 1 if num_failed else 0


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, or a range such as 1-200")
    return seeds


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    numbers = [] if text == "none" else text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,3, or none")
    return [int(number) for number in numbers]


def _part(scenario: AnyScenario, requests: list[int] | None, faults: list[int] | None) -> AnyScenario:
    return scenario.only(
        list(range(len(scenario.requests))) if requests is None else requests,
        list(range(len(scenario.faults))) if faults is None else faults,
    )


def _print_report(report: Report, *, always: bool = True, log: bool = False) -> bool:
    """Print a report; returns True if it has violations."""
    if log:
        sys.stdout.write("\n".join(report.last_events) + "\n")
    if report.violations or always:
        sys.stdout.write(f"seed {report.seed}: {report.outcomes}, {report.virtual_s:.1f} s, {report.digest}\n")
    for violation in report.violations[:_MAX_VIOLATIONS]:
        sys.stdout.write(f"  {violation.name}: {violation.what[:_MAX_CHARACTERS]}\n")
    sys.stdout.flush()
    return bool(report.violations)


def _shrink(scenario: AnyScenario) -> bool:
    shrunk = shrink(scenario)
    if shrunk is None:
        sys.stdout.write(f"seed {scenario.seed}: everything holds\n")
        return False
    _print_report(shrunk.report)
    for fault in shrunk.scenario.faults:
        sys.stdout.write(f"  {fault}\n")
    for request in shrunk.scenario.requests:
        sys.stdout.write(f"  a request at {request.at_s:.3f} s, {len(request.prompt)} + {request.max_tokens} tokens\n")
    sys.stdout.write(f"after {shrunk.num_runs} runs; again: {shrunk.command()}\n")
    return True


if __name__ == "__main__":
    prepare_streams()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except OutputError as error:
        code = error.exit_code()
    exit_process(code)
