"""Starts what a benchmark measures, as a user would: the kvferry command, on cores of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_UP = re.compile(r"kvferry is up: (\S+)")


@dataclass(frozen=True)
class Running:
    """A kvferry command that serves."""

    url: str
    pid: int


@contextmanager
def kvferry(*arguments: str, cores: Sequence[int] | None = None) -> Iterator[str]:
    """Run `kvferry ARGUMENTS` on these cores until the end of the block; the URL it printed."""
    with running(*arguments, cores=cores) as server:
        yield server.url


@contextmanager
def running(
    *arguments: str,
    cores: Sequence[int] | None = None,
    more: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Running]:
    """As `kvferry`, with the process's id; `more` is added to its environment. `log` is kept; without it, the log is
    shown only if the command ends before it serves."""
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(len(cores))} if cores else {}), **(more or {})}
    pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    written = tempfile.TemporaryFile("w+") if log is None else log.open("w+")  # noqa: SIM115 - closed below
    process = subprocess.Popen(
        [*pin, sys.executable, "-m", "kvferry.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=written,
        text=True,
        env=environment,
    )
    try:
        yield Running(_wait_for_url(process, written), process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        written.close()


def _wait_for_url(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if (match := _UP.search(line)) is not None:
            return match[1]
    code = process.wait()
    log.seek(0)
    raise RuntimeError(f"kvferry ended with {code} before it served:\n{log.read()[-2000:]}")


@contextmanager
def disaggregated(model: str, *engine: str) -> Iterator[str]:
    """One prefill and one decode instance behind a router, a core each."""
    with kvferry("serve", model, "--prefill", "1", "--decode", "1", "--port", "0", *engine) as url:
        yield url


@contextmanager
def replicas(model: str, cores: Sequence[int], *engine: str) -> Iterator[str]:
    """A plain instance on each of these cores behind a router."""
    with ExitStack() as stack:
        urls = [stack.enter_context(kvferry("serve", model, "--port", "0", *engine, cores=[core])) for core in cores]
        decode = [flag for url in urls for flag in ("--decode-url", url)]
        yield stack.enter_context(kvferry("router", *decode, "--port", "0", cores=list(cores)[:1]))
