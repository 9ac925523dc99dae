"""`kvferry calibrate`: measures how long a model's steps take on this machine, and the times of its stores, for the
simulator."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from cyclopts import Parameter
from rich.console import Console

from kvferry.cli.cache.warming import Server
from kvferry.cli.checks import check_before_start
from kvferry.cli.common import ENGINE, LOG, EngineFlags, LogFlags
from kvferry.cli.demo.requests import Endpoint
from kvferry.cli.flags import complete
from kvferry.cli.planning.calibration import Calibration, InstanceLimits, PromptGenerator, facts_of
from kvferry.cli.planning.simulate import SEED, progress
from kvferry.cli.serving.alongside import ENDPOINT, run_alongside
from kvferry.connectors.kv_store.loader import BATCH_BLOCKS
from kvferry.core import entropy
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, Unavailable
from kvferry.core.keys import http_secret
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import Bounds
from kvferry.core.settings.files import require_writable
from kvferry.core.settings.model import changed
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.fleet_settings import FleetSettings
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.signed_client import SignedClient
from kvferry.observe.logs import LogConfig, set_up_logging
from kvferry.router.config import RouterConfig
from kvferry.sim.times import KVSize, MachineTimes, MediumTimes, StoreTimes, write_times
from kvferry.store.base import Block, BlockRead, KVStore
from kvferry.store.media.file import FileOptions
from kvferry.store.table import find_store

HANDED_OVER = 64
"""During a calibration, prompts of at least this number of tokens are handed off; shorter prompts measure the router's
cost."""
ROUNDS = Bounds(1, 1000)
UNKNOWN_START_S = 5.0
"""Start time in seconds that is assumed for an instance that already ran, so that its start could not be measured."""
_NAME = "calibrated"

_MAX_STORE_BYTES = 256 * 2**20
_STORE_ROUNDS = 5


def calibrate(
    model: Annotated[
        str,
        Parameter(
            help="A model, of which a prefill and a decode instance are started; or the http:// URL of an instance."
        ),
    ],
    *,
    write: Annotated[Path, Parameter(help="Write the times to this file, for --times.")] = Path("times.json"),
    seed: Annotated[int, Parameter(help="Decides which prompts are sent.")] = 0,
    rounds: Annotated[int, Parameter(help="How many times everything is measured.")] = 5,
    store_folder: Annotated[
        Path | None, Parameter(help="Where a store's files would be: their times are measured there. Default: /tmp.")
    ] = None,
    engine: EngineFlags = ENGINE,
    log: LogFlags = LOG,
) -> int:
    """Measure how long steps, hand-offs, stores and the start of an instance take, and write them for the simulator.

    Takes about three minutes with a small model. Nothing else should run on the machine during this time:

        kvferry calibrate kvferry/tiny-python --write times.json

    An instance that runs already is measured without hand-offs and stores, and under its current load. Give the flags
    of the engine with which it was started:

        kvferry calibrate http://10.0.0.3:8001 --max-num-batched-tokens 1024
    """
    SEED.require("--seed", seed)
    ROUNDS.require("--rounds", rounds)
    require_writable("--write", write)
    folder = store_folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"--store-folder {folder}: there is no such folder")
    logs = complete(LogConfig, log)
    set_up_logging(logs, "calibrate")
    if model.startswith(("http://", "https://")):
        times = run_async(_running(model.rstrip("/"), complete(EngineConfig, engine, model=model), seed, rounds))
    else:
        times = _started(complete(EngineConfig, engine, model=model), logs, seed, rounds)
        times = msgspec.structs.replace(times, store=run_async(_measure_stores(times.kv, folder)))
    write_times(write, times)
    Console(highlight=False).print(in_words(times, write), soft_wrap=True)
    return 0


def in_words(times: MachineTimes, path: Path) -> str:
    """The measurements as text."""
    step, transfer, error = times.step, times.transfer, times.step_error
    return (
        f"{times.model} on {times.machine}\n"
        f"step: {step.base_s * 1e3:.3f} ms, {step.prefill_token_s * 1e6:.2f} µs a token of prefill,"
        f" {step.decode_sequence_s * 1e6:.1f} µs a sequence that decodes, {step.context_token_s * 1e9:.1f} ns a token"
        f" of context, {step.prefill_pair_s * 1e9:.2f} ns a pair of tokens in prefill\n"
        f"request: {step.request_s * 1e3:.2f} ms, and {transfer.latency_s * 1e3:.2f} ms a hop; router and client:"
        f" {transfer.token_s * 1e3:.2f} ms of CPU time a token\n"
        f"transfer: {transfer.bandwidth / 1e9:.2f} GB/s, {transfer.peer_s * 1e3:.2f} ms a message,"
        f" {transfer.wake_s * 1e3:.2f} ms from engine to connector;"
        f" start: {times.start_s:.1f} s\n"
        f"{_of_medium('files', times.store.file)}; {_of_medium('shared memory', times.store.memory)}\n"
        f"fit of {error.num_samples} measured steps: off by {error.p50:.1%} (median), {error.p90:.1%} (P90),"
        f" {error.largest:.1%} at most\n"
        f"written to {path}"
    )


def _of_medium(name: str, times: MediumTimes) -> str:
    return (
        f"{name}: {times.write_bandwidth / 1e9:.2f} GB/s written, {times.read_bandwidth / 1e9:.2f} read,"
        f" {times.latency_s * 1e6:.0f} µs a block"
    )


def _started(engine: EngineConfig, log: LogConfig, seed: int, rounds: int) -> MachineTimes:
    """Start P and D, and measure them."""
    settings = FleetSettings(
        spec=FleetShapeSettings(prefill=1, decode=1),
        engine=engine,
        instance=InstanceSettings(served_model_name=(_NAME,)),
        router=RouterConfig(disaggregate_from=str(HANDED_OVER)),
        listen=ListenSettings(
            port=0, grace_s=0.0
        ),  # this command is the only client, and it no longer waits for answers
        log=log,
    )
    check_before_start(
        settings.engine, settings.choice, settings.listen, settings.access, settings.spec, settings.router
    )
    begun = SYSTEM_CLOCK.monotonic()
    times: list[MachineTimes] = []

    async def job(urls: Mapping[str, str]) -> None:
        start_s = SYSTEM_CLOCK.monotonic() - begun
        prefill, decode = (
            next(url for name, url in urls.items() if name.startswith(role)) for role in ("prefill", "decode")
        )
        times.append(await _measured(decode, prefill, urls[ENDPOINT], engine, seed, rounds, start_s))

    run_async(run_alongside(_NAME, settings, job))
    return times[0]


def _cpu_of_routers() -> Callable[[], float]:
    """Return a function that measures the CPU seconds of this process and of the routers that it has started."""
    this_process = psutil.Process()
    processes = [
        this_process,
        *(child for child in this_process.children(recursive=True) if "router" in child.cmdline()[:8]),
    ]

    def cpu_s() -> float:
        try:
            times = [process.cpu_times() for process in processes]
        except psutil.NoSuchProcess as error:
            raise Unavailable("the router ended; its last log lines give the reason") from error
        return float(sum(cpu.user + cpu.system for cpu in times))

    return cpu_s


async def _running(url: str, engine: EngineConfig, seed: int, rounds: int) -> MachineTimes:
    """Measure an instance that runs."""
    return await _measured(url, None, None, engine, seed, rounds, UNKNOWN_START_S)


async def _measured(
    url: str, prefill: str | None, router: str | None, engine: EngineConfig, seed: int, rounds: int, start_s: float
) -> MachineTimes:
    async with HttpClient(client_name="this command") as client:
        facts = await facts_of(Server(SignedClient(client, http_secret([])), url))
        instance = Endpoint(client, url)
        with progress("measuring") as on_progress:
            calibration = Calibration(
                instance,
                None if prefill is None else Endpoint(client, prefill),
                None if router is None else Endpoint(client, router),
                InstanceLimits(facts, engine.max_num_seqs, engine.max_num_batched_tokens),
                await PromptGenerator.read(instance, facts.max_model_len, seed),
                on_progress,
                None if router is None else _cpu_of_routers(),
            )
            await calibration.measure(rounds)
    settings = {name: str(value) for name, value in changed(engine, without=("model",)).items()}
    day = datetime.fromtimestamp(SYSTEM_CLOCK.wall(), UTC).strftime("%Y-%m-%d")
    return calibration.times(facts.model_names[0] if router is None else engine.model, day, start_s, settings)


async def _measure_stores(kv: KVSize, folder: Path) -> StoreTimes:
    """Put blocks into files of a new folder in `folder` and into shared memory, and get them again. The files are read
    from the system's page cache, if there is memory for them. Raises `ConfigError`, `StoreError`."""
    name = entropy.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="kvferry-calibrate-", dir=folder) as files:
        file = await _measure_medium(lambda num_blocks: f"file:{files}", kv, threads=FileOptions().threads)
    memory = await _measure_medium(lambda num_blocks: f"memory:?num_blocks={num_blocks}&name={name}", kv, threads=1)
    return StoreTimes(file=file, memory=memory)


async def _measure_medium(url: Callable[[int], str], kv: KVSize, *, threads: int) -> MediumTimes:
    """`threads`: number of threads that read a batch at the same time."""
    half = max(1, kv.token_bytes // kv.num_layers // 4)
    batch = max(1, min(BATCH_BLOCKS, _MAX_STORE_BYTES // 2 // (kv.token_bytes * kv.block_size)))
    tiny = await _with_store(
        url(2 * BATCH_BLOCKS), kv, 1, lambda store: _round_trip(store, _STORE_ROUNDS, BATCH_BLOCKS)
    )
    whole = await _with_store(url(2 * batch), kv, half, lambda store: _round_trip(store, _STORE_ROUNDS, batch))
    latency_s = statistics.mean(tiny) / BATCH_BLOCKS
    num_bytes = batch * kv.token_bytes * kv.block_size
    written_s, read_s = whole
    return MediumTimes(
        latency_s=latency_s,
        write_bandwidth=num_bytes / max(written_s - batch * latency_s, written_s / 4),
        read_bandwidth=num_bytes / max(read_s - -(-batch // threads) * latency_s, read_s / 4),
    )


async def _with_store(
    url: str, kv: KVSize, half: int, use: Callable[[KVStore], Awaitable[tuple[float, float]]]
) -> tuple[float, float]:
    layers = (LayerLayout(1, half, half),) * kv.num_layers
    layout = KVLayout(model_fingerprint="calibrated", dtype="bfloat16", block_size=kv.block_size, layers=layers)
    store = find_store(url).make(layout)
    await store.open()
    try:
        return await use(store)
    finally:
        await store.close()


async def _round_trip(store: KVStore, rounds: int, batch: int) -> tuple[float, float]:
    """Seconds to put a batch of new blocks, and to get them: medians, without the first round."""
    layout = store.layout
    views = [memoryview(bytearray(layout.span_bytes(layer))) for layer in range(layout.num_layers)]
    samples: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        names = [entropy.token_bytes(32) for _ in range(batch)]
        begun = SYSTEM_CLOCK.monotonic()
        await store.put([Block(name, views) for name in names])
        put = SYSTEM_CLOCK.monotonic()
        await store.get([BlockRead(name, views) for name in names])
        samples.append((put - begun, SYSTEM_CLOCK.monotonic() - put))
        await store.delete(names)
    return statistics.median(sample for sample, _ in samples[1:]), statistics.median(
        sample for _, sample in samples[1:]
    )
