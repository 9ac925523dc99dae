"""`python -m kvferry.sim SEED [SEED …]`, or `FIRST-LAST`: run the scenarios of these seeds, and tell what did not
hold."""

from __future__ import annotations

import sys
import time

from kvferry.sim.scenario import draw, run


def main(arguments: list[str]) -> int:
    """Returns 1 if something did not hold."""
    keep_log = "--log" in arguments
    with_faults = "--no-faults" not in arguments
    seeds: list[int] = []
    for argument in arguments:
        if not argument.startswith("--"):
            first, _, last = argument.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    num_failed, begun = 0, time.process_time()
    for seed in seeds:
        report = run(draw(seed, with_faults=with_faults), keep_log=keep_log)
        if keep_log:
            sys.stdout.write("\n".join(report.last_events) + "\n")
        num_failed += bool(report.violations)
        sys.stdout.flush()
        if report.violations or len(seeds) <= 8:
            sys.stdout.write(f"seed {seed}: {report.outcomes}, {report.virtual_s:.1f} s, {report.digest}\n")
        for violation in report.violations[:6]:
            sys.stdout.write(f"  {violation.name}: {violation.what[:1500]}\n")
    seconds = time.process_time() - begun
    sys.stdout.write(f"{len(seeds)} seeds, {num_failed} failed, {seconds:.1f} s of CPU time\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
