"""A simulated instance: the real HTTP server, scheduler, block pool and connector, with a duration instead of a forward
pass.

Owns the executor, which replaces the model by `sim.kv`, and the task that runs the engine's steps.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    ServesPeers,
    StepPlan,
    WorkerSide,
    check_side,
    statistics_of,
)
from kvferry.connectors.multi.plan import MultiPlan
from kvferry.connectors.multi.worker import MultiWorkerSide
from kvferry.connectors.p2p.plan import P2pPlan
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.connectors.registry import find_connector
from kvferry.core.blocks.layout import LayerLayout
from kvferry.core.errors import ConnectorLost, KvferryError
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import EngineCore
from kvferry.engine.executor.base import Executor, PlanQueue, StepResult
from kvferry.engine.scheduling.sequence import Sequence as EngineSequence
from kvferry.engine.scheduling.step import Chunk, SampledToken
from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.stepped import SteppedEngine
from kvferry.http.server.http_server import HttpServer
from kvferry.sim.kv import TOKEN_BYTES, KVContents, SimLayout, counted_token, sample
from kvferry.sim.loop import SimLoop, SimProcess
from kvferry.sim.machine import SimMachine
from kvferry.sim.storage import Storage
from kvferry.sim.stretch import Batches, decode_at_once
from kvferry.sim.times import StepTimes, StepWork, StoreTimes
from kvferry.sim.transfers import SimMemory
from kvferry.transport.memory import BlockGeometry, Region

MODEL = "simulated"
Role = Literal["prefill", "decode", "both"]
KV_ROLES: dict[Role, Literal["kv_producer", "kv_consumer", "kv_both"]] = {
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "both": "kv_both",
}


@dataclass(frozen=True)
class SimInstanceSpec:
    """One kind of instance. `layer_bytes`: bytes of the KV of one token in one layer. `start_s`: from the start of a
    process until it listens; `empty_step_s`: duration of a step that computes nothing; `wake_s`: delay between the
    engine's thread and a transfer loop, in both directions; `token_s`: CPU time of router and client for each token, if
    they have the same cores (`Network.cores`). `connector`: its name, and `options`: its settings
    (`kv_connector_extra_config`); `engine`: further settings of `EngineConfig`; `takes_any_role`: its role may change
    while it runs.

    `has_contents`: blocks have contents (`sim.kv`), and a wrong one gives a wrong token; if not, a token depends only
    on seed and position, and `tokens_at_once` may be more than 1: so many tokens of an answer leave an instance
    together, except its first, and decode-only steps are batched.
    """

    num_blocks: int = 2048
    block_size: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16384
    max_waiting: int = 1024
    num_layers: int = 2
    layer_bytes: int = 65536
    vocab_size: int = 4096
    times: StepTimes = field(default_factory=StepTimes)
    start_s: float = 5.0
    empty_step_s: float = 50e-6
    wake_s: float = 0.0
    token_s: float = 0.0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    connector: str = "P2pConnector"
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    takes_any_role: bool = False
    has_contents: bool = True
    tokens_at_once: int = 1

    def layout(self) -> SimLayout:
        """The layout of the only rank."""
        half = self.layer_bytes // 4  # key and value, two bytes each
        layers = (LayerLayout(1, half, half),) * self.num_layers
        return SimLayout(model_fingerprint=MODEL, dtype="bfloat16", block_size=self.block_size, layers=layers)

    def transfer(self, role: Role, host: str) -> KVTransferConfig:
        """The connector's configuration for an instance with this role."""
        connector = self._of_connector({"kv_connector": self.connector, "kv_connector_extra_config": self.options})
        return KVTransferConfig(
            kv_role="kv_both" if self.takes_any_role else KV_ROLES[role],
            kv_ip=host,
            kv_load_failure_policy=self.kv_load_failure_policy,
            **connector,
        )

    def _of_connector(self, config: dict[str, Any]) -> dict[str, Any]:
        """A connector's configuration, with the simulator's replacements."""
        options = dict(config.get("kv_connector_extra_config", {}))
        if "connectors" in options:
            options["connectors"] = [self._of_connector(child) for child in options["connectors"]]
        elif config["kv_connector"] == "P2pConnector":
            options["lookup_buffer"] = "kvferry.sim.transfers:SimLookupBuffer"
        else:  # as many blocks wait for the store, but with fewer bytes
            default = KVTransferConfig(kv_connector="").kv_buffer_size
            config = {**config, "kv_buffer_size": config.get("kv_buffer_size", default) / self.layout().true_bytes()}
        return {**config, "kv_connector_extra_config": options}


class _Tokenizer:
    """Words `t0`, `t1`, …, and no chat template."""

    chat_template = None

    def __init__(self, vocab_size: int) -> None:
        self.backend_tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(vocab_size)}, "t0"))

    def get_added_vocab(self) -> dict[str, int]:
        """It has no special tokens."""
        return {}


@cache
def _tokenizer(vocab_size: int) -> _Tokenizer:
    return _Tokenizer(vocab_size)


class _Model:
    """The attributes of a model that the engine needs besides its logits."""

    fingerprint = MODEL
    trained_context = None
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = _tokenizer(vocab_size)
        self.default_sampling: dict[str, Any] = {}


class SimExecutor(Executor):
    """Computes a model's results at once, or in the model's time (`run`). One rank, the real worker side."""

    model: Any

    def __init__(
        self,
        spec: SimInstanceSpec,
        process: SimProcess,
        transfer: KVTransferConfig,
        auth_token: str,
        machine: SimMachine,
    ) -> None:
        self.spec = spec
        self._cores = process.host.cores
        self.layout: SimLayout = spec.layout()
        self.model = _Model(spec.vocab_size)
        self.num_blocks, self.max_model_len = spec.num_blocks, spec.max_model_len
        self.contents = KVContents(spec.num_layers, spec.num_blocks, spec.block_size) if spec.has_contents else None
        context = ConnectorContext(
            transfer,
            self.layout,
            auth_token,
            process.simulation,
            saves_are_complete=True,
            delays_answers=True,
            machine=machine,
        )
        self.side: WorkerSide[Any] = find_connector(transfer).build_worker_side(context)
        self.side.register(self._memory(process))
        address = self.side.address() if isinstance(self.side, ServesPeers) else None
        self.addresses = [] if address is None else [address]
        self._random = process.simulation.random
        self._num_begun = 0
        self._running: frozenset[str] = frozenset()
        self.busy_s = 0.0
        """Time of all steps that computed something."""

    def _memory(self, process: SimProcess) -> SimMemory:
        """The KV cache: the geometry of the real one, and the simulator's contents."""
        geometry = BlockGeometry.dense(self.layout.real(), self.num_blocks)
        regions = (Region(0, self.num_blocks * self.layout.block_bytes),)
        nothing = memoryview(bytearray(TOKEN_BYTES * self.layout.block_size))
        return SimMemory(geometry, regions, contents=self.contents, process=process, nothing=nothing)

    @property
    def p2p(self) -> P2pWorkerSide | None:
        """The worker side of the P2P connector, alone or as one of several."""
        sides = self.side.children if isinstance(self.side, MultiWorkerSide) else [self.side]
        return next((side for side in sides if isinstance(side, P2pWorkerSide)), None)

    def execute(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        """Execute a step in no time."""
        self._begin(chunks, plans)
        for layer in range(self.spec.num_layers):
            self._save_layer(layer)
        return self._end(chunks)

    async def run(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        """Execute a step in its time: it writes KV at its beginning, announces blocks when their layer is done, and
        reads at its end."""
        saves = self._begin(chunks, plans)
        seconds = self._seconds(chunks) if chunks else self.spec.empty_step_s
        num_parts = self.spec.num_layers if saves else 1
        for part in range(num_parts):
            if seconds:
                await self._compute(seconds / num_parts)
            if saves:
                self._save_layer(part)
        return self._end(chunks)

    async def _compute(self, seconds: float) -> None:
        if self._cores:
            await self._cores[0].compute(seconds)
        else:
            await asyncio.sleep(seconds)

    def _save_layer(self, layer: int) -> None:
        if isinstance(self.side, ByLayers):
            self.side.save_layer(layer)

    def _seconds(self, chunks: Sequence[Chunk]) -> float:
        running = frozenset(chunk.sequence.request_id for chunk in chunks)
        seconds = self.spec.times.drawn(StepWork.of(chunks, len(running - self._running)), self._random)
        self._running = running
        self.busy_s += seconds
        return seconds

    def decode_seconds(self, sequences: Sequence[EngineSequence], number: int) -> list[float]:
        """The durations of the next steps if these sequences decode in each of them and nothing else happens."""
        times, num_sequences = self.spec.times, len(sequences)
        num_new = sum(sequence.request_id not in self._running for sequence in sequences)
        context = sum(sequence.num_computed_tokens + 1 for sequence in sequences)
        works = [
            StepWork(
                decode_sequences=num_sequences,
                context_tokens=context + step * num_sequences,
                num_new=0 if step else num_new,
            )
            for step in range(number)
        ]
        return [times.drawn(work, self._random) for work in works]

    def decode(self, chunks: Sequence[Chunk], plans: PlanQueue, seconds: float, *, is_last: bool) -> StepResult:
        """Execute a decode-only step in no time. `is_last`: the last one of a batch; transfers cannot have advanced
        before, or the batch would be shorter."""
        self._running = frozenset(chunk.sequence.request_id for chunk in chunks)
        self.busy_s += seconds
        if plans.waiting:
            self._begin(chunks, plans)
        sampled = {chunk.sequence.request_id: [SampledToken(self._sample(chunk))] for chunk in chunks if chunk.samples}
        return StepResult(sampled, self.side.poll() if is_last else [])

    def decode_at_once(self, engine: EngineCore, seconds: list[float]) -> list[list[EngineOutput]] | None:
        """Execute a step for each of `seconds`, if they can only decode: see `sim.stretch`."""
        outputs = decode_at_once(
            engine, len(seconds), lambda seed, position: counted_token(seed, position, self.spec.vocab_size)
        )
        if outputs is not None:
            self.busy_s += sum(seconds)
        return outputs

    def _begin(self, chunks: Sequence[Chunk], plans: PlanQueue) -> bool:
        """Begin the waiting plans, as `engine.worker` does. Returns True if the step announces blocks."""
        side, saves = self.side, False
        try:
            for number, plan in enumerate(tuple(plans.waiting), plans.first):
                if number >= self._num_begun:
                    self._begin_one(plan)
                    self._num_begun = number + 1
                    saves = saves or _announces(plan)
                if number < plans.first + plans.num_late:
                    side.discard()
        finally:
            plans.mark_begun(self._num_begun)
        if self.contents is not None:
            for chunk in chunks:
                sequence = chunk.sequence
                tokens = sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
                self.contents.compute(sequence.block_ids, chunk.start, tokens)
        return saves and bool(chunks)

    def _begin_one(self, plan: StepPlan) -> None:
        try:
            if isinstance(self.side, ServesPeers):
                self.side.withdraw(plan)
            self.side.start(plan)
        except Exception as error:
            raise ConnectorLost(f"the connector could not begin a step's transfers: {error!r}") from error

    def _end(self, chunks: Sequence[Chunk]) -> StepResult:
        self.side.flush()
        sampled = {chunk.sequence.request_id: [SampledToken(self._sample(chunk))] for chunk in chunks if chunk.samples}
        return StepResult(sampled, self.side.poll())

    def _sample(self, chunk: Chunk) -> int:
        sequence, length = chunk.sequence, chunk.start + chunk.num_tokens
        if self.contents is None:
            return counted_token(sequence.seed, length, self.spec.vocab_size)
        attended = self.contents.attended(sequence.block_ids, length)
        return sample(attended, sequence.seed, length, self.spec.vocab_size)

    def on_report(self, wake: Callable[[], None]) -> None:
        self.side.on_report(wake)

    def statistics(self) -> dict[str, float]:
        return statistics_of(self.side)

    def check(self) -> None:
        check_side(self.side)

    def close(self) -> None:
        self.side.close()


def _announces(plan: StepPlan | None) -> bool:
    """True if a plan announces blocks layer by layer."""
    if isinstance(plan, MultiPlan):
        return any(map(_announces, plan.plans))
    return isinstance(plan, P2pPlan) and bool(plan.saves)


class SimEngine(SteppedEngine):
    """An engine whose steps run in a task on its own loop."""

    poll_s = 0.25
    """Seconds between two checks of an idle engine for overdue requests if tokens leave in batches. A real one checks
    every 5 ms; all other events wake it."""
    min_steps = 3
    """Min number of steps that are batched."""

    def __init__(self, engine: EngineCore, executor: SimExecutor, process: SimProcess) -> None:
        super().__init__(engine, [MODEL])
        self._executor, self._process = executor, process
        self._thread = process.thread("engine")
        self._wakeup = asyncio.Event()
        self._ended: asyncio.Future[None]
        self._is_stepping = False
        self.is_between_steps = True
        at_once = executor.spec.tokens_at_once
        self._batches = Batches(at_once, process.simulation) if at_once > 1 else None

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        host, token_s = self._process.host, self._executor.spec.token_s
        if host.cores and token_s and (number := sum(len(output.token_ids) for output in outputs)):
            host.network.core_of(host.network.cores, host).spend(number * token_s, lambda: None)
        if self._batches is not None:
            outputs = self._batches.pass_on(outputs, self._process.simulation.now)
        super()._deliver(outputs)

    def start(self) -> None:
        """Begin stepping."""
        super().start()
        self._ended = asyncio.get_running_loop().create_future()
        self._is_stepping = True
        self.engine.on_transfer(self._wake_later)
        self._thread.call_soon_threadsafe(lambda: self._thread.create_task(self._run()))

    async def close(self) -> None:
        """End the steps and the engine."""
        self._closing = True
        self.wake()
        await self._ended
        self.engine.close()

    @property
    def is_stepping(self) -> bool:
        """True if the task runs."""
        return self._is_stepping

    def wake(self) -> None:
        """Wake the task if it waits between two steps."""
        self._thread.call_soon_threadsafe(self._wakeup.set)

    def _wake_later(self) -> None:
        """Call `wake` after `wake_s`; called by a transfer loop's thread."""
        if wake_s := self._executor.spec.wake_s:
            asyncio.get_running_loop().call_later(wake_s, self.wake)
        else:
            self.wake()

    async def _run(self) -> None:
        try:
            while not self._closing:
                self._wakeup.clear()
                self._serve_calls()
                self.is_between_steps = False
                outputs = await self._step()
                self.is_between_steps = True
                if (after_step := self._process.simulation.after_step) is not None:
                    after_step(self.engine)
                self._deliver(outputs)
                if self._batches is not None and not self._process.host.cores:
                    await self._decode_ahead(self._batches)
                await self._wait_for_work()
        except Exception as failure:  # noqa: BLE001 - as in `AsyncEngine`
            self._process.simulation.errors.append(
                {"message": f"an engine failed: {failure!r}", "exception": failure, "loop": self._thread.name}
            )
            self._on_failure(failure)
        finally:
            self._is_stepping = False
            self._on_end()
            self._ended.get_loop().call_soon_threadsafe(self._ended.set_result, None)

    async def _step(self) -> list[Any]:
        stepping = self.engine.stepping()
        try:
            chunks = next(stepping)
            while True:
                if chunks and self._process.simulation.is_logging:
                    chunk_texts = " ".join(
                        f"{chunk.sequence.order}:{chunk.start}+{chunk.num_tokens}" for chunk in chunks
                    )
                    self._process.simulation.note(f"{self._process.name} computes {chunk_texts}")
                try:
                    result = await self._executor.run(chunks, self.engine.plans)
                except Exception as error:  # noqa: BLE001 - the boundary between scheduling and the ranks
                    chunks = stepping.throw(error)
                else:
                    chunks = stepping.send(result)
        except StopIteration as end:
            outputs: list[Any] = end.value
            return outputs

    async def _decode_ahead(self, batches: Batches) -> None:
        """Batch decode-only steps: wait until the last step before a sequence ends, or until an event, and then execute
        all finished steps. Each is a step of the real engine, in no time."""
        seconds = self._seconds_ahead()
        if len(seconds) < self.min_steps:
            return
        ends = list(accumulate(seconds, initial=self._thread.time()))[1:]
        try:
            async with asyncio.timeout_at(ends[-1]):
                await self._wakeup.wait()
        except TimeoutError:
            pass
        number = min(bisect_left(ends, self._thread.time()) + 1, len(ends))  # including the running step
        await asyncio.sleep(ends[number - 1] - self._thread.time())
        super()._deliver(self._make_steps(seconds[:number], ends[:number], batches))

    def _make_steps(self, seconds: list[float], ends: list[float], batches: Batches) -> list[EngineOutput]:
        """Execute the first and the last step as the engine does, with transfers; the steps between in one batch,
        unless events are possible."""
        last = len(ends) - 1
        steps = [self._step_at_once(seconds[0], is_last=last == 0)]
        if last >= self.min_steps:
            steps += self._executor.decode_at_once(self.engine, seconds[1:last]) or ()
        for step_index in range(len(steps), len(ends)):
            steps.append(self._step_at_once(seconds[step_index], is_last=step_index == last))
        return [output for step, end in zip(steps, ends, strict=True) for output in batches.pass_on(step, end)]

    def _seconds_ahead(self) -> list[float]:
        """The durations of the next steps if all sequences only decode."""
        running = self.engine.scheduler.uniform_decodes()
        remaining = [sequence.request.sampling.max_tokens - sequence.num_output_tokens for sequence in running]
        number = min(self._executor.spec.tokens_at_once, *remaining) - 1 if remaining else 0
        return self._executor.decode_seconds(running, number)

    def _step_at_once(self, seconds: float, *, is_last: bool) -> list[EngineOutput]:
        stepping = self.engine.stepping()
        try:
            chunks = next(stepping)
            while True:
                chunks = stepping.send(self._executor.decode(chunks, self.engine.plans, seconds, is_last=is_last))
        except StopIteration as end:
            outputs: list[EngineOutput] = end.value
            return outputs

    async def _wait_for_work(self) -> None:
        rest_s = self._idle_timeout_s()
        if rest_s == 0.0:
            return
        if rest_s is not None and self._batches is not None:
            rest_s = self.poll_s
        try:
            async with asyncio.timeout(rest_s):
                await self._wakeup.wait()
        except TimeoutError:
            pass


class SimInstance:
    """One instance of a deployment, across its processes: after a crash, a new process may start at the same
    address."""

    def __init__(
        self,
        name: str,
        role: Role,
        spec: SimInstanceSpec,
        process: SimProcess,
        port: int,
        token: str,
        storage: Storage | None = None,
    ) -> None:
        self._storage = storage or Storage(process.simulation, StoreTimes())
        self.name, self.role, self.spec, self.port, self._token = name, role, spec, port, token
        self.host = process.host
        self.process = process
        self.engine: EngineCore | None = None
        self.executor: SimExecutor | None = None
        self.engine_client: SimEngine | None = None
        self.server: HttpServer | None = None
        self._number = 0
        self._server_loop: SimLoop

    @property
    def is_between_steps(self) -> bool:
        """True if the engine may be inspected."""
        return self.engine_client is not None and self.engine_client.is_between_steps

    @property
    def url(self) -> str:
        """The URL at which it serves."""
        return f"http://{self.host.address}:{self.port}"

    def start(self, start_delay_s: float = 0.0) -> None:
        """Begin serving, after this time."""
        loop = self._server_loop = self.process.thread("server")
        loop.call_soon(lambda: loop.create_task(self._serve(start_delay_s)))

    def crash(self) -> None:
        """End at once, like a killed process."""
        self.process.crash()

    def restart(self) -> None:
        """Start a new process after the last one has ended. It serves after `start_s`."""
        self._number += 1
        self.engine = self.executor = self.engine_client = self.server = None
        self.host.is_up = True
        self.process = self.host.process(f"{self.name}.{self._number}")
        self.start(self.spec.start_s)

    async def _serve(self, start_delay_s: float) -> None:
        await asyncio.sleep(start_delay_s)
        process, spec = self.process, self.spec
        transfer = spec.transfer(self.role, self.host.address)
        config = EngineConfig(
            model=MODEL,
            block_size=spec.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_waiting=spec.max_waiting,
            **spec.engine,
        )
        true_bytes, pauses = spec.layout().true_bytes(), spec.has_contents
        machine = SimMachine(self._storage, process, true_bytes, pauses=pauses, wake_s=spec.wake_s)
        executor = self.executor = SimExecutor(spec, process, transfer, self._token, machine)
        engine = EngineCore(config, executor, transfer, self._token, process.simulation, machine=machine)
        engine_client = SimEngine(engine, executor, process)
        engine_client.start()
        settings = ServerConfig(host=self.host.address, port=self.port, secret=self._token, shutdown_grace_s=30.0)
        self.server = server = build_app(engine_client, settings, clock=process.simulation).server()
        server.listen(lambda host, port: self.host.listen(process, port))  # type: ignore[arg-type,return-value]
        self.engine, self.engine_client = engine, engine_client
        try:
            await server.run()
        finally:
            await engine_client.close()
            process.simulation.note(f"{process.name} has stopped")
            if self.engine is engine:  # its process may continue while a disk hangs
                self.engine = None

    def keep(self, prompt: Sequence[int], *, pin: bool) -> None:
        """Pin or unpin a prompt's blocks in the instance's stores, as an operator does, without waiting for the
        answer."""
        engine_client, loop = self.engine_client, self._server_loop
        if engine_client is None or not self.process.is_alive:
            return
        request = Request(request_id="", prompt_token_ids=list(prompt), sampling=SamplingParams(max_tokens=1))

        async def change_pins() -> None:
            with suppress(KvferryError):
                await engine_client.stored_blocks(request, pin=pin)

        loop.call_soon(lambda: loop.create_task(change_pins()))

    def release(self, transfer_id: str) -> None:
        """Release a hand-off, as a router does if it will not be fetched, without waiting for the answer."""
        engine_client, loop = self.engine_client, self._server_loop
        if engine_client is None or not self.process.is_alive:
            return

        async def release() -> None:
            with suppress(KvferryError):
                await engine_client.release(transfer_id)

        loop.call_soon(lambda: loop.create_task(release()))

    def stop(self) -> None:
        """Shut down as at SIGTERM, which ends a starting instance at once."""
        if self.server is not None:
            self.server.stop()
        else:
            self.process.crash()
