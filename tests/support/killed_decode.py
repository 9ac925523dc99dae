"""Decode instances that are killed in the middle of answers, and started again at the same address."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from support.members import Member
from support.processes import KvferryProcess, kvferry

ROUTER = (
    *("--health-interval-s=0.2", "--health-timeout-s=2", "--between-bytes-timeout-s=5"),
    "--continuations=12",  # a slow machine's answers lose more instances than the three of the default
)


class Restarted(Protocol):
    """An instance that a test kills."""

    process: KvferryProcess
    """The one that serves now."""

    def restart(self) -> None:
        """Kill it, and start another one at its address; returns when it serves."""


class Killed:
    """A prefill instance, decode instances and their router. While `killing`, decode instances with running requests
    are killed, one after another, and started again."""

    pause_s = 0.7
    """Seconds that an instance runs requests before it is killed."""

    def __init__(self, prefill: KvferryProcess, decode: Sequence[Restarted], router: KvferryProcess, seed: int) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router
        self.num_kills = 0
        self._random = random.Random(seed)
        self._stop = threading.Event()

    @contextmanager
    def killing(self) -> Iterator[None]:
        """Kill decode instances until the end of the block, which raises what failed in a start."""
        self._stop.clear()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._kill_until_stopped()
            except BaseException as error:  # noqa: BLE001 - raised at the end of the block
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def continuations(self, outcome: str) -> float:
        """Number of answers that another instance was to continue."""
        return self.router.metric("kvferry_router_continuations_total", outcome=outcome)

    def _kill_until_stopped(self) -> None:
        while not self._stop.wait(self._random.uniform(0.3, 1.0) * self.pause_s):
            member = self._random.choice(self.decode)
            if member.process.metric("vllm:num_requests_running"):
                self.num_kills += 1
                member.restart()


@contextmanager
def killed_decode(model: Path, folder: Path, *, seed: int = 1) -> Iterator[Killed]:
    """Start all of it."""
    with ExitStack() as stack:
        members = [Member(role, model, folder, lease_s=3.0) for role in ("prefill", "decode", "decode")]
        for member in members:
            stack.callback(member.stop)
            member.start()
        prefill, *decode = members
        urls = [f"--{member.role}-url={member.process.url}" for member in members]
        router = stack.enter_context(kvferry("router", *urls, *ROUTER, log=folder / "router.log"))
        yield Killed(prefill.process, decode, router, seed)
