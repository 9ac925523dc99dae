"""A process with one vLLM in it, which steps as long as there is work, and does what the test says in between.

All of vLLM (scheduler, worker, KV cache) is in that one process, so that the test can look into its block pool. vLLM
itself is real and unmodified. The processes are forked from one that has imported vLLM already.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "kvferry.adapters.vllm.connector",
)
START_S = 150.0
WAIT_S = 60.0


@dataclass
class Answer:
    """One request's."""

    token_ids: list[int]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None


@dataclass
class State:
    """What a vLLM keeps right now. `leaks`: what its connector's `check` says, if anything."""

    num_requests: int
    num_used_blocks: int
    figures: Counter[str]
    leaks: str | None
    preemptions: float = 0.0
    log: list[str] = field(default_factory=list)


class VllmFailed(Exception):
    """vLLM raised; the text is its traceback."""


class VllmProcess:
    """See the module. `kv_transfer` are the fields of vLLM's KVTransferConfig; None: plain vLLM."""

    def __init__(self, model: Path, kv_transfer: dict[str, Any] | None = None, **engine_args: Any) -> None:
        os.environ.update(ENVIRONMENT)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(model), kv_transfer, engine_args))
        self._process.start()
        theirs.close()
        self._num_requests = 0
        self.answers: dict[str, Answer] = {}

    def ready(self) -> VllmProcess:
        """Wait until vLLM has started. Raises `VllmFailed`."""
        self._answer(START_S)
        return self

    def ask(self, command: str, **arguments: Any) -> Any:
        """Do one thing there."""
        self._connection.send((command, arguments))
        return self._answer(WAIT_S)

    def _answer(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise VllmFailed(f"no answer within {timeout_s:g} s")
        try:
            succeeded, answer = self._connection.recv()
        except EOFError:
            raise VllmFailed("the process has ended") from None
        if not succeeded:
            raise VllmFailed(answer)
        return answer

    # Requests.

    def add(self, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **more: Any) -> str:
        """Begin a request; returns its name here. `more`: `lora`, the fields of a `LoRARequest`; all else becomes part
        of vLLM's prompt, such as `cache_salt` or `multi_modal_data`."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        self.ask("add", name=name, prompt=list(prompt), max_tokens=max_tokens, params=params, **more)
        return name

    def wait(self, name: str) -> Answer:
        """Its answer."""
        deadline = time.monotonic() + WAIT_S
        while name not in self.answers:
            self.answers.update(self.ask("take"))
            if time.monotonic() > deadline:
                raise VllmFailed(f"request {name} has no answer after {WAIT_S:g} s: {self.state()}")
        return self.answers.pop(name)

    def run(self, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **more: Any) -> Answer:
        """One request, to its end."""
        return self.wait(self.add(prompt, max_tokens, params, **more))

    def prefill(self, prompt: Sequence[int], transfer_id: str, **more: Any) -> dict[str, Any]:
        """Prefill for another instance; returns the ticket."""
        answer = self.run(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer_id}, **more)
        assert answer.kv_transfer_params is not None, answer
        return answer.kv_transfer_params

    # Insight.

    def state(self) -> State:
        """Now."""
        found = self.ask("state")
        return State(**found | {"figures": Counter(found["figures"])})

    def settled(self) -> State:
        """Wait until no request and no block is left; what is there then. Raises `AssertionError` when it stays."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = self.state()
            if not state.num_requests and not state.num_used_blocks and state.leaks is None:
                return state
            assert time.monotonic() < deadline, state

    def close(self) -> None:
        """End it."""
        try:
            self._connection.send(("end", {}))
            self._process.join(WAIT_S)
        except OSError:
            pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


# In the process.


def early_ticket(prefill: VllmProcess, decode: VllmProcess, transfer_id: str) -> dict[str, Any]:
    """A ticket as the concurrent hand-off has it: where the producer is, and no more."""
    ticket = prefill.prefill([5], transfer_id + "-address")
    decode.ask("refuse", params=ticket)
    keys = ("do_remote_prefill", "remote_host", "remote_port", "remote_engine_id")
    return {key: ticket[key] for key in keys} | {"transfer_id": transfer_id}


def _serve(connection: Any, model: str, kv_transfer: dict[str, Any] | None, engine_args: dict[str, Any]) -> None:
    try:
        server = _Server(connection, model, kv_transfer, engine_args)
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
    try:
        server.serve()
    except EOFError:  # the test has ended without saying so
        pass
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


class _Server:
    def __init__(
        self, connection: Any, model: str, kv_transfer: dict[str, Any] | None, engine_args: dict[str, Any]
    ) -> None:
        import logging

        from vllm import LLM
        from vllm.config import KVTransferConfig

        from support.troubled_stores import HeldUpDisk

        self._connection = connection
        self._log: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("kvferry").addHandler(handler)
        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 96 << 20,
            "max_model_len": 4096,
            "block_size": 32,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
        } | engine_args
        config = KVTransferConfig(**kv_transfer) if kv_transfer is not None else None
        self._disk = HeldUpDisk()
        self._disk.install()
        self._engine = LLM(model=model, kv_transfer_config=config, **settings).llm_engine
        self._core = self._engine.engine_core.engine_core
        self._answers: dict[str, Answer] = {}
        self._frozen = False
        while self._core.scheduler.has_requests():  # as a server's loop does: the connector hears from its workers
            self._step()

    def serve(self) -> None:
        pause = 0.05
        while True:
            if self._connection.poll(pause):
                command, arguments = self._connection.recv()
                if command == "end":
                    return self._end()
                self._connection.send((True, getattr(self, command)(**arguments)))
            pause = 0.05
            if not self._frozen and self._core.scheduler.has_requests():
                pause = 0 if self._step() else 0.001  # as vLLM's own loop, which leaves the core to others

    def _end(self) -> None:
        self._core.shutdown()

    def _step(self) -> bool:
        """Whether there may be more to do at once."""
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                [one] = output.outputs
                answer = Answer(list(one.token_ids), one.finish_reason, output.kv_transfer_params)
                self._answers[output.request_id] = answer
        return bool(outputs)

    # Commands.

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        lora: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        adapter = LoRARequest(**lora) if lora else None
        self._engine.add_request(name, {"prompt_token_ids": prompt} | more, sampling, lora_request=adapter)

    def load_adapter(self, **lora: Any) -> None:
        """What vLLM's server does with `/v1/load_lora_adapter`, and with `--lora-modules` at its start."""
        from vllm.lora.request import LoRARequest

        assert self._engine.add_lora(LoRARequest(**lora))

    def take(self) -> dict[str, Answer]:
        answers, self._answers = self._answers, {}
        return answers

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def refuse(self, params: dict[str, Any]) -> None:
        """What vLLM's server does with a request that it answers with an error: its connector hears of the ticket."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}, watermarking=False)
        request = EngineCoreRequest(
            request_id=f"refused-{params['transfer_id']}",
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=True,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def hold_up_disk(self, seconds: float) -> None:
        """Calls into directories of stores take so long from now on."""
        self._disk.set(seconds)

    def freeze(self) -> None:
        """No steps until `thaw`."""
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False

    def steps(self, count: int) -> None:
        """So many steps, and no more."""
        for _ in range(count):
            self._step()

    def state(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        log, self._log[:] = list(self._log), []
        return {
            "num_requests": len(scheduler.requests),
            "num_used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "figures": self._figures(),
            "leaks": self._leaks(),
            "preemptions": sum(m.value for m in self._engine.get_metrics() if m.name == "vllm:num_preemptions"),
            "log": log,
        }

    def _halves(self) -> list[Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connectors = [self._core.scheduler.connector] if self._core.scheduler.connector is not None else []
        if has_kv_transfer_group():  # not with several ranks, which are processes of their own
            connectors.append(get_kv_transfer_group())
        flat = [child for connector in connectors for child in getattr(connector, "_connectors", [connector])]
        return [half for child in flat for half in (child._scheduler, child._worker) if half is not None]

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for half in self._halves():
            figures |= (half if hasattr(half, "statistics") else half.side).statistics()
        return figures

    def _leaks(self) -> str | None:
        from kvferry.core.errors import LeakError

        for half in self._halves():
            try:
                half.side.check()
                half.check()
            except LeakError as error:
                return str(error)
        return None

    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self._core.scheduler.kv_cache_config.kv_cache_groups)

    def fingerprint(self) -> str:
        """What the connector calls the model."""
        [name] = {half.facts.layout.model_fingerprint for half in self._halves() if hasattr(half, "facts")}
        return str(name)

    def packing(self) -> str:
        """How the connector names the arrangement of pages."""
        [name] = {half.facts.layout.packing for half in self._halves() if hasattr(half, "facts")}
        return str(name)

    def reset_prefix_cache(self) -> None:
        assert self._engine.reset_prefix_cache()

    def reset_connector_cache(self) -> bool:
        return bool(self._core.scheduler.reset_connector_cache())

    def speculation(self) -> dict[str, float]:
        """vLLM's counters of guesses."""
        return {
            metric.name: metric.value
            for metric in self._engine.get_metrics()
            if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
        }

    def metrics(self) -> dict[str, float]:
        """Those of vLLM's Prometheus registry that are kvferry's, as `name kind`."""
        return {
            f"{metric.name} {metric.labels['kind']}".rstrip(): metric.value
            for metric in self._engine.get_metrics()
            if "kvferry" in metric.name
        }
