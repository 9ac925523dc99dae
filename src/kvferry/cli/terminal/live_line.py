"""The line below everything else that shows the load of what serves, redrawn with each update of its page's stream."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from datetime import datetime

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvferry.cli.router_address import RouterAddress, reachable_url
from kvferry.cli.terminal.summary import ServeSummary
from kvferry.cli.watch.state import WatchedState
from kvferry.core.errors import KvferryError
from kvferry.core.names import resolve
from kvferry.core.runtime.threads import Thread, run_async

EVENTS = "kvferry.cli.watch.follow:events"
"""Resolved when it is needed, because it imports the code of the page."""


class LiveLine:
    """Follows the page's stream in a thread of its own, with a loop of its own: the loop of the process may be busy
    with a step. It ends without a message if the stream cannot be read."""

    refresh_interval_s = 5.0
    """Seconds until a stream that has ended is opened again."""
    join_s = 2.0

    def __init__(self, console: Console, url: str, summary: ServeSummary) -> None:
        self._address = RouterAddress(router=reachable_url(url), admin_key=summary.admin_key, tls_ca=summary.tls_ca)
        self._live = Live(Text(""), console=console, auto_refresh=False, transient=True)
        self._state = WatchedState()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_stopped = threading.Event()
        self._thread = Thread(self._run, name="live line")

    def start(self) -> None:
        """Begin to show the line."""
        self._live.start()
        self._thread.start()

    def stop(self) -> None:
        """Remove the line."""
        self._has_stopped.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join(self.join_s)
        self._live.stop()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError, KvferryError, OSError, ValueError):
            run_async(self._follow())

    async def _follow(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._following, self._loop = task, asyncio.get_running_loop()
        events = resolve(EVENTS)
        while not self._has_stopped.is_set():
            async with aclosing(events(self._address)) as stream:
                async for content in stream:
                    self._state.apply(content)
                    self._live.update(Text(load_text(self._state), style="dim", no_wrap=True), refresh=True)
            await asyncio.sleep(self.refresh_interval_s)


def load_text(state: WatchedState) -> str:
    """The load in at most 80 columns."""
    instances = [instance for instance in state.instances.values() if instance.get("alive", True)]

    waiting = sum(float(instance.get("waiting") or 0) for instance in instances)
    running = sum(float(instance.get("running", instance.get("in_flight", 0)) or 0) for instance in instances)
    used = [float(instance["kv_used"]) for instance in instances if instance.get("kv_used") is not None]
    parts = [
        f"{running:.0f} running",
        f"{waiting:.0f} waiting",
        f"{state.last('output_tokens') or 0:.0f} tok/s",
        f"TTFT {_milliseconds(state.last('ttft_p50'))}",
        f"ITL P99 {_milliseconds(state.last('itl_p99'))}",
        *([f"KV {100 * max(used):.0f} %"] if used else []),
    ]
    return f"{datetime.fromtimestamp(state.now).astimezone():%H:%M:%S}  {' · '.join(parts)}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"
