"""`kvferry trace record`: records a trace of the requests of a running router."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
from cyclopts import App, Parameter

from kvferry.cli import completion
from kvferry.cli.router_address import RouterAddress
from kvferry.cli.watch.servers import Servers
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.messages.traffic import TRAFFIC_PATH, RequestObservation, TrafficReport
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import Bounds
from kvferry.sim.traffic import COLUMNS

POLL_S = 2.0
FOR_S, BEFORE_S = Bounds(1, 30 * 86_400), Bounds(0, 86_400)

trace = App(name="trace", help="Traces of real traffic, for `simulate`, `plan` and `bench`.", sort_key=11)


@trace.command
def record(
    url: Annotated[str, Parameter(help="URL of a router.", completer=completion.urls)],
    *,
    for_s: Annotated[float | None, Parameter(help="Seconds to record. Default: until Ctrl-C.")] = None,
    before_s: Annotated[
        int, Parameter(help="Also write what the router remembers of this many seconds before (0: nothing).")
    ] = 0,
    admin_key: Annotated[str | None, Parameter(help="Admin key of the router, if it has one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a router at https://.")] = None,
) -> int:
    """Record arrival times, and lengths of prompts and answers, of a router's requests, to standard output.

        kvferry trace record http://127.0.0.1:8000 --for-s 600 > trace.csv

    No text and no tokens are recorded. The format is the one of Azure's traces; `simulate`, `plan` and `bench` read it.
    """
    if for_s is not None:
        FOR_S.require("--for-s", for_s)
    BEFORE_S.require("--before-s", before_s)
    address = RouterAddress(router=url, admin_key=admin_key, tls_ca=tls_ca)
    recorder = Recorder(sys.stdout)
    try:
        run_async(_record(address, recorder, for_s, before_s))
    except KeyboardInterrupt:
        recorder.finish()
    sys.stderr.write(f"kvferry: {recorder.num_written} requests recorded\n")
    return 0


async def _record(address: RouterAddress, recorder: Recorder, for_s: float | None, before_s: int) -> None:
    begun = SYSTEM_CLOCK.monotonic()
    async with Servers(address.tls_ca, address.admin_key) as servers:
        is_first = True
        while for_s is None or SYSTEM_CLOCK.monotonic() - begun < for_s or is_first:
            seconds = max(1, before_s) + 3600
            try:
                answer = await servers.json(address.router, f"{TRAFFIC_PATH}?seconds={seconds}")
                report = msgspec.convert(answer, TrafficReport)
            except msgspec.ValidationError as error:
                raise ConfigError(f"what answers at {address.router} is no router of kvferry's: {error}") from error
            except KvferryError:
                if is_first:
                    raise
                await asyncio.sleep(POLL_S)  # the router is being restarted
                continue
            if is_first:
                recorder.since = report.now - before_s
            recorder.take(report)
            is_first = False
            left_s = POLL_S if for_s is None else min(POLL_S, begun + for_s - SYSTEM_CLOCK.monotonic())
            await asyncio.sleep(max(0.0, left_s))
        recorder.take(
            msgspec.convert(await servers.json(address.router, f"{TRAFFIC_PATH}?seconds=3600"), TrafficReport)
        )
    recorder.finish()


class Recorder:
    """Writes requests in the order of their arrival, each once it has ended. `since`: seconds since 1970 from which
    arrivals are recorded."""

    def __init__(self, output: TextIO) -> None:
        self._output, self.since, self.num_written = output, 0.0, 0
        self._last = float("-inf")
        self._waiting: dict[tuple[float, int], RequestObservation] = {}

    def take(self, report: TrafficReport) -> None:
        """Add the requests of a report. Write those that have ended and arrived before all running ones."""
        seen = {
            (request.arrived, request.prompt_tokens): request
            for request in report.requests
            if request.arrived >= self.since and request.arrived > self._last
        }
        self._waiting = {key: request for key, request in self._waiting.items() if request.state == "done"} | seen
        for request in self._ready():
            self._write(request)

    def finish(self) -> None:
        """Write all requests that have ended."""
        for key in sorted(self._waiting):
            if self._waiting[key].state == "done":
                self._write(self._waiting[key])
        self._waiting.clear()
        self._output.flush()

    def _ready(self) -> Iterator[RequestObservation]:
        for key in sorted(self._waiting):
            request = self._waiting[key]
            if request.state == "running":
                return
            del self._waiting[key]
            self._last = request.arrived
            if request.state == "done":
                yield request

    def _write(self, request: RequestObservation) -> None:
        if not self.num_written:
            self._output.write(",".join(COLUMNS) + "\n")
        self.num_written += 1
        at = datetime.fromtimestamp(request.arrived, UTC)
        answer = 1 + round(request.output_tokens)
        self._output.write(f"{at:%Y-%m-%d %H:%M:%S.%f}+00:00,{max(1, request.prompt_tokens)},{answer}\n")
        self._output.flush()
