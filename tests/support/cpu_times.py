"""What tests cost in CPU time, their child processes included: `pytest -p support.cpu_times …` ends with a list.

Wall time says little on a busy machine. A child counts where it is waited for, so that of a shared instance counts for
the test in which it ends. Fixtures count for the test that makes them.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator

import pytest

NUM_SHOWN = 40
_spent: Counter[str] = Counter()


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        _spent[item.nodeid] += _cpu_s() - before  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"CPU seconds: {sum(_spent.values()):.0f}, the dearest {NUM_SHOWN}")
    files: Counter[str] = Counter()
    for name, spent in _spent.items():
        files[name.partition("::")[0]] += spent
    for name, spent in [*files.most_common(NUM_SHOWN), *_spent.most_common(NUM_SHOWN)]:
        terminalreporter.write_line(f"{spent:8.1f}  {name}")
