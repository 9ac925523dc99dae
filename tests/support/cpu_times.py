"""What tests cost in CPU time, their child processes included: `pytest -p support.cpu_times …` ends with a list.

Wall time says little on a busy machine. A child counts where it is waited for, so that of a shared instance counts for
the test in which it ends, as do the processes that `support.warm` forks, which are the children of another. Fixtures
count for the test that makes them.
Works in the processes of pytest-xdist too. `KVFERRY_CPU_TIMES=FILE` writes all of it there, a line for each test.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_SHOWN = 40
_spent: Counter[str] = Counter()


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _forked_cpu_s()


def _forked_cpu_s() -> float:
    """Of the process that `support.warm` forks others from, once there is one, and of those that have ended."""
    module = sys.modules.get("multiprocessing.forkserver")
    pid = module._forkserver._forkserver_pid if module is not None else None
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class _Meter:
    last_s = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _Meter.last_s = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of each of a test's three phases; the report goes to whoever writes the summary."""
    report = yield
    now_s = _cpu_s()
    report.cpu_s = now_s - _Meter.last_s  # type: ignore[attr-defined]
    _Meter.last_s = now_s
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[report.nodeid] += getattr(report, "cpu_s", 0.0)  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"CPU seconds: {sum(_spent.values()):.0f}, the dearest {NUM_SHOWN}")
    files: Counter[str] = Counter()
    for name, spent in _spent.items():
        files[name.partition("::")[0]] += spent
    for name, spent in [*files.most_common(NUM_SHOWN), *_spent.most_common(NUM_SHOWN)]:
        terminalreporter.write_line(f"{spent:8.1f}  {name}")
    if path := os.environ.get("KVFERRY_CPU_TIMES"):
        Path(path).write_text("".join(f"{spent:.3f}\t{name}\n" for name, spent in _spent.most_common()))
