"""`kvferry demo`: runs prefill and decode on two instances, shows their work, and compares them with one plain
instance."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cli.checks import check_before_start
from kvferry.cli.common import LOG, LogFlags
from kvferry.cli.demo.requests import DemoAnswer, DemoPrompt, Endpoint
from kvferry.cli.demo.token_gaps import Characters, draw_stalls, measure_stalls, verdict
from kvferry.cli.flags import complete
from kvferry.cli.serving.attended import AttendedFleet
from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import summary_of
from kvferry.core.errors import KvferryError
from kvferry.core.keys import fleet_token
from kvferry.core.runtime.threads import run_async
from kvferry.engine.config import EngineConfig
from kvferry.fleet.backends.local.fork_server import ForkServer
from kvferry.fleet.display import Display
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.spec.fleet_settings import FleetSettings, fleet_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet, RoleSpec
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.http_client import HttpClient
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import LogConfig

PROMPTS = (("heapq.py", 200), ("textwrap.py", 500), ("inspect.py", 900), ("argparse.py", 1500))
"""Files of the standard library, and number of their first tokens that are the prompt."""

NUM_TOKENS = 48
LONG_PROMPTS, LONG_TOKENS = ("tarfile.py", "typing.py", "subprocess.py", "pickle.py"), 2000
"""Files whose first tokens are the long prompts, and number of these tokens."""
BAR_WIDTH = 13
_ROUTER, _PLAIN = "router-0", "plain"
PHASES = (
    ("queue", "arrived", "prefill_started", "bright_black"),
    ("prefill", "prefill_started", "prefill_done", "blue"),
    ("transfer", "prefill_done", "transfer_done", "yellow"),
    ("decode", "transfer_done", "done", "green"),
)
"""Phases of a request: name, from, to, colour (without colours, its first letter). The transfer is its part after the
end of prefill."""


def demo(
    model: Annotated[str, Parameter(help="Model to show; any that `kvferry serve` takes.")] = "kvferry/tiny-python",
    *,
    keep: Annotated[bool, Parameter(help="Leave everything serving afterwards, until Ctrl-C.", negative=())] = False,
    port: Annotated[int, Parameter(help="Port of the endpoint; 0 takes any free one.")] = 0,
    log: LogFlags = LOG,
) -> int:
    """Serve a model with prefill and decode apart, ask it for a few completions, and show how long each phase took.

    The completions are sampled with a seed, and every token is compared with the token of a plain instance. Ends by
    itself:

        kvferry demo
    """
    logs = complete(LogConfig, log)
    console = Console(highlight=False)
    settings = FleetSettings(
        spec=FleetShapeSettings(prefill=1, decode=1),
        # float32: in bfloat16, rounding on two machines may choose different ones of two equally likely tokens.
        engine=EngineConfig(model=model, dtype="float32", kv_cache_memory="256MiB"),
        instance=InstanceSettings(served_model_name=("demo",)),
        # Without --keep, this command is the only client, and it waits for no answers once it is stopped.
        listen=ListenSettings(port=port) if keep else ListenSettings(port=port, grace_s=0.0),
        log=logs,
    )
    check_before_start(settings.engine, settings.choice, settings.listen, settings.access)
    return run_async(_run(settings, console, keep))


async def _run(settings: FleetSettings, console: Console, keep: bool) -> int:
    """Run the fleet, a plain instance and the demo's requests at the same time. When one of them ends, the others are
    ended."""
    token = fleet_token()
    title = f"{settings.engine.model} · 1 P + 1 D, beside one plain instance on the same cores"
    summary = summary_of("demo", settings.listen, settings.access, title=title, has_block=keep)
    watching = _Watching(open_display(settings.log, summary))
    DigestCache()  # as in `run_attended`
    forks = ForkServer()
    make_recipe = partial(recipe_of, token=token)
    split, plain = (
        AttendedFleet(fleet, make_recipe, display, token=token, grace_s=settings.listen.grace_s, fork_server=forks)
        for fleet, display in ((fleet_of("demo", settings), watching), (_plain(settings), _Beside(watching)))
    )
    serving = [asyncio.create_task(endpoint.run()) for endpoint in (split, plain)]
    asking = asyncio.create_task(_ask_and_show(watching, console))
    await asyncio.wait([*serving, asking], return_when=asyncio.FIRST_COMPLETED)
    try:
        code = asking.result() if asking.done() else 1
        if code == 0 and not keep:
            console.print(_next_step(settings.engine.model), soft_wrap=True)
        if keep and code == 0 and not any(endpoint.done() for endpoint in serving):
            console.print(f"\nStill serving at [bold]{watching.urls[_ROUTER]}[/bold]; Ctrl-C ends everything.")
            await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
    except KvferryError as error:
        console.print(f"kvferry: error: {error}", style="red")
        code = 1
    finally:
        asking.cancel()
        for endpoint in (split, plain):
            endpoint.stop()
        ended = await asyncio.gather(*serving)
        await forks.close()
    return code or max(ended)


def _plain(settings: FleetSettings) -> DesiredFleet:
    """One more instance of the model, which does both phases and moves no KV, on the cores of the others."""
    alone = replace(settings, spec=FleetShapeSettings(), listen=msgspec.structs.replace(settings.listen, port=0))
    return msgspec.structs.replace(fleet_of("plain", alone), role={"both": RoleSpec()})


def _next_step(model: str) -> Text:
    """The command to try next, with the name under which this terminal finds it."""
    program = "kvferry" if shutil.which("kvferry") else str(Path(sys.executable).with_name("kvferry"))
    return Text(f"\nTo serve it yourself:  {program} serve {model} --prefill 1 --decode 1")


class _Watching:
    """A display that also records which members are up. While the demo prints an answer (`printing`), log lines
    wait."""

    max_waiting = 1000
    """Log lines that wait for the end of an answer. If there are too many, the last ones are kept."""

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self.urls: dict[str, str] = {}
        self.up_beside, self.is_up = asyncio.Event(), asyncio.Event()
        """True if the plain instance and the fleet serve."""
        self._printing = False
        self._waiting: deque[tuple[str, str]] = deque(maxlen=self.max_waiting)

    @contextmanager
    def printing(self) -> Iterator[None]:
        """True while the demo writes text without a line end."""
        self._printing = True
        try:
            yield
        finally:
            self._printing = False
            while self._waiting:
                self._inner.line(*self._waiting.popleft())

    def line(self, name: str, text: str) -> None:
        if self._printing:
            self._waiting.append((name, text))
        else:
            self._inner.line(name, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ready(self, name: str, url: str) -> None:
        self.urls[name] = url
        self._inner.ready(name, url)

    def up(self, url: str) -> None:
        self._inner.up(url)
        self.is_up.set()


class _Beside:
    """The display of the plain instance. It shows little, because the user did not start this instance."""

    def __init__(self, watching: _Watching) -> None:
        self._watching = watching

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watching, name)

    def up(self, url: str) -> None:
        self._watching.urls[_PLAIN] = url
        self._watching.up_beside.set()

    def note(self, text: str) -> None:
        """Ignored: the other display shows the same."""

    def stopping(self, text: str) -> None:
        """Ignored as `note`."""

    def close(self) -> None:
        """Does nothing: the other display restores the terminal."""


# What it asks.

Printing = Callable[[], AbstractContextManager[None]]


async def _ask_and_show(watching: _Watching, console: Console) -> int:
    await watching.up_beside.wait()
    await watching.is_up.wait()
    urls, printing = watching.urls, watching.printing
    async with HttpClient() as client:
        router, plain = Endpoint(client, urls[_ROUTER]), Endpoint(client, urls[_PLAIN])
        prompts = [await router.cut(name, length) for name, length in PROMPTS]
        await _show_stalls({"P/D": router, "plain": plain}, prompts[0], console, printing)
        answers = [await router.ask(prompt, NUM_TOKENS) for prompt in prompts]
        console.print()
        console.print(_times(prompts, answers, console))
        console.print(_legend(console))
        expected = [await plain.ask(prompt, NUM_TOKENS) for prompt in prompts]
        return _compare(prompts, answers, expected, console)


async def _show_stalls(
    endpoints: Mapping[str, Endpoint], short: DemoPrompt, console: Console, printing: Printing
) -> None:
    """Stream an answer while long prompts arrive, on one endpoint after the other, and draw both."""
    longs = [await endpoints["plain"].cut(name, LONG_TOKENS) for name in LONG_PROMPTS]
    console.print(
        f"\nSomeone sends {len(longs)} prompts of {LONG_TOKENS} tokens while you read an answer."
        " [bold]Time between two tokens of it:[/bold]"
    )
    with printing():
        measured = {name: await measure_stalls(endpoint, short, longs) for name, endpoint in endpoints.items()}
        titles = {"P/D": "prefill and decode on two instances", "plain": "one plain instance"}
        characters: Characters = "ascii" if console.options.ascii_only else "blocks"
        drawn = draw_stalls({titles[name]: stalls for name, stalls in measured.items()}, console.width, characters)
        for line in drawn:
            console.print(line, no_wrap=True)
    text, is_shorter = verdict(measured["P/D"], measured["plain"])
    console.print(f"\n{text}", style="bold green" if is_shorter else "yellow")


# What it shows.


def _times(prompts: Sequence[DemoPrompt], answers: Sequence[DemoAnswer], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, title="Where each request's time went, in ms", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for name in ("queue", "prefill", "transfer", "first token", "decode"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("", no_wrap=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        times = answer.timeline
        seconds = {name: times.span(start, end) or 0.0 for name, start, end, _ in PHASES}
        figures = [
            seconds["queue"],
            seconds["prefill"],
            seconds["transfer"],
            times.span("arrived", "first_token") or 0.0,
            seconds["decode"],
        ]
        row = [f"{figure * 1e3:.1f}" for figure in figures]
        table.add_row(f"{prompt.name}, {len(prompt.token_ids)}", *row, _bar(seconds, console))
    return table


def _bar(seconds: Mapping[str, float], console: Console) -> Text:
    """The phases as a bar, each as long as its share of the time."""
    total = sum(max(value, 0.0) for value in seconds.values()) or 1.0
    bar = Text()
    for name, _, _, colour in PHASES:
        bar.append(_mark(name, console) * round(BAR_WIDTH * max(seconds[name], 0.0) / total), style=colour)
    return bar


def _legend(console: Console) -> Text:
    legend = Text()
    for name, _, _, colour in PHASES:
        legend.append(f"{_mark(name, console)} ", style=colour)
        legend.append(f"{name}   ")
    legend.append("(transfer: its part after the end of prefill)\n", style="dim")
    return legend


def _mark(phase: str, console: Console) -> str:
    return "█" if console.color_system else phase[0]


def _compare(
    prompts: Sequence[DemoPrompt], answers: Sequence[DemoAnswer], plain: Sequence[DemoAnswer], console: Console
) -> int:
    differing = [
        prompt.name
        for prompt, split_answer, plain_answer in zip(prompts, answers, plain, strict=True)
        if split_answer.token_ids != plain_answer.token_ids
    ]
    if differing:
        console.print(f"✗ The tokens of {', '.join(differing)} differ from a plain instance's.", style="red")
        return 1
    total = sum(len(answer.token_ids) for answer in answers)
    console.print(f"✓ All {total} tokens equal a plain instance's.", style="bold green")
    return 0
