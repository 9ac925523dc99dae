"""`kvferry top`: shows a router's instances and figures in the terminal while they change."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.markup import escape
from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Static

from kvferry.cli import completion
from kvferry.cli.router_address import RouterAddress
from kvferry.cli.watch.follow import candidates, events, find
from kvferry.cli.watch.state import WatchedState
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.runtime.threads import run_async
from kvferry.http.tls import client_context

COLUMNS = ("Role", "Instance", "State", "Running", "Waiting", "KV", "Held", "Engine")


def top(
    url: Annotated[
        str | None,
        Parameter(
            help="URL of a router. Default: one of this user's fleets, or of ports 8000 to 8015.",
            completer=completion.urls,
        ),
    ] = None,
    *,
    json: Annotated[bool, Parameter(help="Print the figures once, as JSON, after one update.", negative=())] = False,
    admin_key: Annotated[str | None, Parameter(help="Admin key of the router, if it has one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a router at https://.")] = None,
) -> int:
    """Watch a router: its instances, latencies and events, as on its page.

        kvferry top

        kvferry top http://127.0.0.1:8000 --json

    q ends it; s sorts by another column. An instance that has far more requests than others of its role is marked.
    """
    if tls_ca is not None:
        client_context(tls_ca)
    address = RouterAddress(router=url or run_async(find(candidates())), admin_key=admin_key, tls_ca=tls_ca)
    if json:
        sys.stdout.write(run_async(once(address)))
        return 0
    if not sys.stdout.isatty():
        raise ConfigError("standard output is no terminal; use --json")
    watching = Top(address.router, lambda: events(address))
    watching.run()
    if watching.failure:
        raise ConfigError(watching.failure)
    return 0


async def once(address: RouterAddress) -> str:
    """The figures after one snapshot and one update, as JSON."""
    state = WatchedState()
    async with aclosing(events(address)) as stream:
        async with asyncio.timeout(60):
            state.apply(await anext(stream))
            state.apply(await anext(stream))
    return msgspec.json.format(msgspec.json.encode(state.to_builtins())).decode() + "\n"


class Top(App[None]):
    """Shows the stream that `connect` opens. If the router is lost, it tries again until the user quits. `failure`: the
    error that ended the display; empty: the user ended it."""

    refresh_interval_s = 2.0
    """Seconds until the next attempt to reach a lost router."""

    TITLE = "kvferry top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; padding: 0 1; }
    DataTable { height: 1fr; }
    #events { height: auto; max-height: 8; border-top: solid $secondary; }
    """
    BINDINGS = [("q", "quit", "Quit"), ("s", "sort", "Sort")]  # noqa: RUF012 - textual's own declaration

    def __init__(self, url: str, connect: Callable[[], AsyncIterator[bytes]]) -> None:
        super().__init__()
        self._url, self._connect = url, connect
        self.state, self.failure = WatchedState(), ""
        self._lost = ""
        self._sorted_by = 1

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield Static(f"connecting to {self._url} …", id="figures")
        yield DataTable(id="instances", cursor_type="row", zebra_stripes=True)
        yield Static("", id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one("#instances", DataTable).add_columns(*COLUMNS)
        self.run_worker(self._follow(), exclusive=True)

    def action_sort(self) -> None:
        """Sort the instances by the next column."""
        self._sorted_by = (self._sorted_by + 1) % len(COLUMNS)
        self.show()

    async def _follow(self) -> None:
        while True:
            try:
                async for content in self._connect():
                    self.state.apply(content)
                    self._lost = ""
                    self.show()
                error = "the stream ended"
            except ConfigError as refusal:
                self.failure = str(refusal)
                self.exit()
                return
            except KvferryError as loss:
                error = str(loss)
            self._lost = self._lost or f"lost since {time_of_day(SYSTEM_CLOCK.wall())}: {error}"
            self.show()
            await asyncio.sleep(self.refresh_interval_s)

    def show(self) -> None:
        """Show the state."""
        self.query_one("#figures", Static).update(figures_text(self._url, self.state, self._lost))
        table = self.query_one("#instances", DataTable)
        row, busiest = table.cursor_row, {self.state.busiest(role) for role in ("prefill", "decode")}
        table.clear()
        rows = [instance_row(instance, busiest) for instance in self.state.instances.values()]
        for cells in sorted(rows, key=lambda cells: sort_key(cells, self._sorted_by)):
            table.add_row(*(escape(cell) for cell in cells))
        if rows:
            table.move_cursor(row=min(row, len(rows) - 1))
        last = list(self.state.events)[-5:][::-1]
        lines = [event_text(event) for event in last]
        self.query_one("#events", Static).update("\n".join(lines) or "Nothing has happened since it looks.")


def figures_text(url: str, state: WatchedState, lost: str) -> str:
    """The lines above the table."""
    roles = [str(instance.get("role")) for instance in state.instances.values()]
    p, d = roles.count("prefill"), len(roles) - roles.count("prefill")
    latencies = ", ".join(
        f"{label} {milliseconds(state.last(name))}"
        for label, name in (("TTFT p50", "ttft_p50"), ("p99", "ttft_p99"), ("ITL p50", "itl_p50"), ("p99", "itl_p99"))
    )
    lines = [
        f"[b]kvferry top[/b]  {escape(url)}  {escape(', '.join(state.models))}  {p} P  {d} D",
        f"{rate(state.last('requests'))} requests/s  in {rate(state.last('input_tokens'))} tok/s"
        f"  out {rate(state.last('output_tokens'))} tok/s  {latencies}",
        f"hand-offs {rate((state.last('hand_off_bytes') or 0) / 1e6)} MB/s,"
        f" {milliseconds(state.last('hand_off_ms'))} each;  found in a cache {percent(state.last('hits'))}",
    ]
    if state.verdict:
        lines.append(escape(state.verdict))
    if lost:
        lines.append(f"[b red]{escape(lost)}[/b red]")
    return "\n".join(lines)


def time_of_day(at: float) -> str:
    """A time, in seconds since 1970, as hours, minutes and seconds of the local time."""
    return f"{datetime.fromtimestamp(at).astimezone():%H:%M:%S}"


def event_text(event: dict[str, Any]) -> str:
    """One line about an event."""
    return f"{time_of_day(event['at'])} {escape(event['text'])}"


def instance_row(instance: dict[str, Any], busiest: set[str]) -> tuple[str, ...]:
    """The cells of one instance."""
    name, used = str(instance["name"]), instance.get("kv_used")
    running = instance.get("running", instance.get("in_flight", 0))
    waiting = instance.get("waiting")
    state = "draining" if instance.get("draining") and not instance.get("drained") else str(instance.get("state"))
    return (
        "P" if instance.get("role") == "prefill" else "D",
        f"{name} (busiest)" if name in busiest else name,
        "drained" if instance.get("drained") else state,
        f"{running or 0:.0f}",
        "–" if waiting is None else f"{waiting:.0f}",
        percent(used),
        f"{instance.get('held') or 0:.0f}",
        str(instance.get("engine") or "?"),
    )


def sort_key(cells: tuple[str, ...], column: int) -> tuple[float, tuple[str, ...]]:
    """Numbers from the largest on, names from A on."""
    number = cells[column].removesuffix(" %")
    return (-float(number) if number.replace(".", "").isdecimal() else 0.0, (cells[column], *cells))


def milliseconds(value: float | None) -> str:
    """A time in ms; – where it was not measured."""
    return "–" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def percent(share: float | None) -> str:
    """A share in percent; – where it was not measured."""
    return "–" if share is None else f"{100 * share:.0f} %"


def rate(value: float | None) -> str:
    """A number a second; – where it was not measured."""
    return "–" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
