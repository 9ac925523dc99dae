"""`kvferry cache warm`: computes long documents once and keeps their KV, so that prompts that begin with them start at
once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.cli.bars import make_bars
from kvferry.cli.cache.documents import Document, read_documents
from kvferry.cli.cache.warming import Outcome, Server, find_instances, warm_all
from kvferry.cli.common import ENGINE, LOG, EngineFlags, LogFlags
from kvferry.cli.flags import complete
from kvferry.cli.serving.alongside import ENDPOINT, run_alongside
from kvferry.core.errors import ConfigError
from kvferry.core.keys import http_secret
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import SECONDS
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.fleet_settings import FleetSettings
from kvferry.fleet.spec.kv_transfer import check_transfer
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.tls import client_context
from kvferry.observe.logs import LogConfig, set_up_logging


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """Where documents are computed, and where and how their KV is kept."""

    url: str | None = None
    """A running instance that keeps KV, or a router, whose prefill instances then share the documents."""

    model: str | None = None
    """Without --url: the model of an engine that is started for this, and stopped afterwards."""

    store: Annotated[tuple[str, ...], Parameter(negative_iterable=(), show_default=False)] = ()
    """With --model: where to keep the KV, such as file:/path; repeat it for tiers, the fastest first."""

    kv_transfer_config: str | None = None
    """With --model, instead of --store: the --kv-transfer-config of the instances that will use the KV."""

    pin: bool = True
    """Protect the blocks from eviction until --unpin; --no-pin lets them be evicted."""

    unpin: Annotated[bool, Parameter(negative=())] = False
    """Compute nothing, and let the KV of the documents be evicted again, in all tiers of all instances."""

    cache_salt: str | None = None
    """The cache_salt of the prompts that are to find the KV; a line's own `cache_salt` takes precedence."""

    admin_key: str | None = None
    """Admin key of the instance or router. Default: as for `kvferry fleet`."""

    tls_ca: Path | None = None
    """Certificate authorities (PEM) of https:// URLs. Default: the system's authorities."""

    timeout_s: float = 3600.0
    """Maximum seconds for one document."""


WarmFlags = Annotated[WarmOptions, Parameter(name="*")]
DEFAULTS = WarmOptions()


def warm(
    documents: Annotated[
        tuple[str, ...],
        Parameter(
            name="documents",
            help="Text files, - for standard input, or .jsonl files with a prompt or messages on each line.",
            allow_leading_hyphen=True,
        ),
    ],
    /,
    *,
    options: WarmFlags = DEFAULTS,
    json: Annotated[bool, Parameter(help="Print JSON instead of a table.", negative=())] = False,
    engine: EngineFlags = ENGINE,
    log: LogFlags = LOG,
) -> int:
    r"""Compute documents once and keep their KV, pinned, in all tiers of a store.

    Prompts that begin with one of them then load this KV instead of computing it. With a running instance or router:

        kvferry cache warm handbook.txt questions.jsonl \
          --url http://127.0.0.1:8000

    With an engine of its own, for a store that instances share; its flags (--dtype, --block-size, …) must be theirs:

        kvferry cache warm handbook.txt --model MODEL \
          --store file:/var/lib/kvferry

    Blocks that are already there are not computed again; --unpin lets them be evicted again. Exit code 1 if a document
    is not kept completely, or the server does not answer.
    """
    if not documents:
        raise ConfigError("kvferry cache warm: name the documents, or - for standard input")
    SECONDS.require("--timeout-s", options.timeout_s)
    logs = complete(LogConfig, log)
    set_up_logging(logs, "warm")
    report = _Report(json)
    warm_up = _make_warm_up(read_documents(documents), options, report)
    try:
        if options.url is not None:
            _require_no_engine_flags(options)
            run_async(warm_up(options.url))
        else:
            run_async(
                run_alongside("warm", _fleet_settings(options, engine, logs), lambda urls: warm_up(urls[ENDPOINT]))
            )
    finally:
        report.close()
    return report.print()


def _require_no_engine_flags(options: WarmOptions) -> None:
    for name, value in (
        ("model", options.model),
        ("store", options.store),
        ("kv-transfer-config", options.kv_transfer_config),
    ):
        if value:
            raise ConfigError(f"--{name} is for an engine that this command starts; leave it out, or leave out --url")


WarmUp = Callable[[str], Coroutine[Any, Any, None]]


def _make_warm_up(documents: Iterator[Document], options: WarmOptions, report: _Report) -> WarmUp:
    async def warm_up(url: str) -> None:
        key = options.admin_key
        async with HttpClient(tls=client_context(options.tls_ca) if url.startswith("https") else None) as http:
            client = SignedClient(http, http_secret([key] if key else []), key)
            await warm_all(
                await find_instances(Server(client, url)),
                documents,
                pin=None if options.unpin else options.pin,
                cache_salt=options.cache_salt,
                timeout_s=options.timeout_s,
                on_progress=report.on_progress,
                on_outcome=report.on_outcome,
            )

    return warm_up


# An engine of its own.


def _fleet_settings(options: WarmOptions, engine: Any, log: LogConfig) -> FleetSettings:
    if options.model is None:
        raise ConfigError("kvferry cache warm: give the --url of a running instance or router, or --model and --store")
    if bool(options.store) == (options.kv_transfer_config is not None):
        raise ConfigError("kvferry cache warm --model: give --store or --kv-transfer-config, one of them")
    text = (
        options.kv_transfer_config
        or msgspec.json.encode(
            {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": list(options.store)}}
        ).decode()
    )
    check_transfer(text)
    producer = msgspec.json.encode({**msgspec.json.decode(text), "kv_role": "kv_producer"}).decode()
    return FleetSettings(
        spec=FleetShapeSettings(),
        engine=complete(EngineConfig, engine, model=options.model),
        instance=InstanceSettings(kv_transfer_config=producer),
        listen=ListenSettings(port=0),
        log=log,
    )


# What is shown.


@dataclass
class _Report:
    """Shows progress bars while documents are computed, if standard error is a terminal, and a table at the end."""

    as_json: bool
    outcomes: list[Outcome] = field(default_factory=list)
    _tasks: dict[str, TaskID] = field(default_factory=dict)
    _bars: Progress | None = None

    def on_progress(self, document: str, num_kept: int, num_blocks: int) -> None:
        """Show how many of a document's blocks are kept."""
        bars = self._started()
        if document not in self._tasks:
            self._tasks[document] = bars.add_task(document, total=num_blocks)
        bars.update(self._tasks[document], completed=num_kept)

    def on_outcome(self, outcome: Outcome) -> None:
        """Remove the bar of a document that is finished."""
        self.outcomes.append(outcome)
        task = self._tasks.pop(outcome.document, None)
        if task is not None and self._bars is not None:
            self._bars.remove_task(task)

    def close(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()

    def print(self) -> int:
        """Print the outcome of each document. Return the exit code."""
        if self.as_json:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(self.outcomes)) + b"\n")
        else:
            console = Console(file=sys.stdout, highlight=False)
            console.print(_table(self.outcomes))
            for outcome in self.outcomes:
                for text in [outcome.error] if outcome.error else _missing(outcome):
                    console.print(f"✗ {outcome.document}: {text}", markup=False, soft_wrap=True)
        return int(any(outcome.error is not None for outcome in self.outcomes))

    def _started(self) -> Progress:
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
            self._bars = make_bars(*columns, TimeElapsedColumn())
            self._bars.start()
        return self._bars


def _table(outcomes: list[Outcome]) -> Table:
    table = Table()
    table.add_column("document", overflow="fold")
    for name in ("tokens", "blocks", "there before", "kept", "pinned"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        figures = (outcome.num_tokens, outcome.num_blocks, outcome.num_before, outcome.num_kept, outcome.num_pinned)
        table.add_row(escape(outcome.document), *map(str, figures))
    return table


def _missing(outcome: Outcome) -> Iterator[str]:
    for tier in outcome.tiers:
        if tier.refusal is not None:
            yield tier.refusal
        if tier.num_present < outcome.num_blocks:
            yield f"tier {tier.tier} has {tier.num_present}" + ("" if tier.is_healthy else " and does not answer")
