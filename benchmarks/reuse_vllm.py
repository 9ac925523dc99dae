"""The part of reuse.py inside vLLM: a document's KV through vLLM's own connectors and through kvferry's.

Each side is a vLLM in a process of its own, all up at once and asked in turns, prompt by prompt; a vLLM without a
connector computes each prompt. Every token is compared with the computed one, and every side says how much of the
prompt it had not to compute.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("reuse_vllm_side.py")
ANSWER_S = 300.0
"""Until a side that does not start or answer is ended."""
COMPUTED = "vLLM, computed"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Document:
    """The prompts: a document, and for each turn a question behind it. Token ids."""

    tokens: list[int]
    questions: list[list[int]]


class SideEnded(Exception):
    """A vLLM that does not start or ended; says why."""


class Side:
    """A vLLM in a process of its own. Use it as a context.

    `rest_s`: seconds after each answer. For a second, vLLM's processes go on waiting in a loop, at the cost of the next
    side's where they share a core. `start_s`: seconds for it to start.
    """

    def __init__(
        self,
        python: Path,
        settings: Mapping[str, Any],
        log: Path,
        rest_s: float = 1.5,
        environment: Mapping[str, str] | None = None,
        start_s: float = ANSWER_S,
    ) -> None:
        self._log, self._rest_s = log, rest_s
        self._up_by = time.monotonic() + start_s
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(CHILD), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End the input, and so the process; does not wait for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait_until_up(self) -> None:
        """Until it takes prompts. Raises `SideEnded`."""
        self._next_line(max(0.0, self._up_by - time.monotonic()))

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The first token and what it took; afterwards the side rests. Raises `SideEnded`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(list(prompt)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideEnded(self._reason()) from None
        reply = self._next_line(ANSWER_S)
        time.sleep(self._rest_s)
        return reply

    def _next_line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(limit_s, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    reply: dict[str, Any] = json.loads(line)
                    return reply
        finally:
            limit.cancel()
        raise SideEnded(self._reason())

    def _reason(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text().splitlines()
        # The first one is the cause: vLLM's engine is a process of its own, whose end is the other's error.
        reason = next((line for line in lines if re.search(r"(Error|Exception): ", line)), " ".join(lines[-1:]))
        return re.sub(r"^.*?(?=\b\w*(Error|Exception): )", "", reason)[-300:] or f"exit code {code}"


def sides(folder: Path, media: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`kv_transfer_config` by name."""

    def side(name: str, **extra: Any) -> dict[str, Any]:
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}

    ours = {"memory": "memory:512MiB?name=reuse_vllm", "file": f"file:{folder}/vllm"}
    ours |= {name: media[name] for name in ("valkey",) if name in media}
    return {
        **{f"vLLM, kvferry's, {name}": side("KvferryKVStoreConnector", store=url) for name, url in ours.items()},
        "vLLM, ExampleConnector (files)": side("ExampleConnector", shared_storage_path=str(folder / "example")),
        "vLLM, OffloadingConnector": side("OffloadingConnector", cpu_bytes_to_use=512 << 20),
        "vLLM, SimpleCPUOffloadConnector": side("SimpleCPUOffloadConnector", cpu_bytes_to_use=512 << 20),
        "vLLM, LMCacheConnectorV1": side("LMCacheConnectorV1"),
    }


@contextmanager
def started_sides(
    python: Path,
    settings: Mapping[str, Any],
    transfers: Mapping[str, dict[str, Any]],
    folder: Path,
    rest_s: float = 1.5,
    environment: Mapping[str, str] | None = None,
    start_s: float = ANSWER_S,
) -> Iterator[tuple[dict[str, Side], dict[str, Any]]]:
    """All `wanted` sides and the one that computes; yields those that are up after `start_s`, and figures of the
    others, which say why they do not run. `environment`: of the sides. Raises `RuntimeError` without the computing one.
    """
    missing: dict[str, Any] = {}
    with ExitStack() as stack:
        up: dict[str, Side] = {}
        for number, (name, transfer) in enumerate({COMPUTED: None, **transfers}.items()):
            log = folder / f"vllm{number}.log"
            side = Side(python, {**settings, "transfer": transfer}, log, rest_s, environment, start_s)
            up[name] = stack.enter_context(side)
        for name in list(up):
            try:
                up[name].wait_until_up()
            except SideEnded as reason:
                missing[name] = {"does not run": str(reason)}
                print(f"{name}: {missing[name]}", flush=True)
                del up[name]
        if COMPUTED not in up:
            raise RuntimeError(f"vLLM does not run: {missing[COMPUTED]}")
        yield up, missing
        for side in up.values():
            side.close()


def measure_vllm(
    python: Path, settings: Mapping[str, Any], transfers: Mapping[str, dict[str, Any]], folder: Path, repeat: int
) -> dict[str, Any]:
    """All `wanted` sides and the one that computes, in turns; one that does not run says why. Raises `RuntimeError` if
    a side gives other tokens than were computed."""
    with started_sides(python, settings, transfers, folder) as (up, missing):
        figures = missing | measure_in_turns(up, settings, repeat)
    for name, side in figures.items():
        if side.get("num_differing"):
            raise RuntimeError(f"{name} gave other tokens than were computed")
    return figures


def _document(settings: Mapping[str, Any], repeat: int) -> Document:
    rng = random.Random(1)

    def some(number: int) -> list[int]:
        return [rng.randrange(settings["vocab"]) for _ in range(number)]

    return Document(some(settings["tokens"]), [some(settings["question"]) for _ in range(repeat)])


def measure_in_turns(up: Mapping[str, Side], settings: Mapping[str, Any], repeat: int) -> dict[str, Any]:
    """Figures of each side, prompt by prompt in turns. `num_differing`: first tokens other than the computed ones."""
    document = _document(settings, repeat)
    stored: dict[str, dict[str, Any]] = {}
    for name, side in up.items():
        side.ask(range(5, 69))  # what is done once only
        stored[name] = side.ask([*document.tokens, 1])
    time.sleep(2)  # what is kept is on its way
    for side in up.values():
        side.ask(range(6, 70))  # and may wait for another step
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in up}
    for question in document.questions:
        for name, side in up.items():
            samples[name].append(side.ask([*document.tokens, *question]))
            print(f"{name}: {samples[name][-1]}", flush=True)
    summaries = {name: _summary(stored[name], some, samples[COMPUTED]) for name, some in samples.items()}
    for name, some in samples.items():
        if name != COMPUTED and min(turn["cached"] for turn in some) < 0.9 * len(document.tokens):
            summaries[name] = {"does not run": f"the KV did not come back: {[turn['cached'] for turn in some]} tokens"}
    return summaries


def _summary(
    stored: Mapping[str, Any], some: Sequence[Mapping[str, Any]], computed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Medians, and medians of the ratios of each turn; `keep_s` is of the one prompt that was kept."""
    differing = [turn["token"] != other["token"] for turn, other in zip(some, computed, strict=True)]
    ratios = {
        name: [turn[name] / other[name] for turn, other in zip(some, computed, strict=True)]
        for name in ("ttft_s", "cpu_s")
    }
    return {
        "ttft_s": statistics.median(turn["ttft_s"] for turn in some),
        "ttft_runs_s": [turn["ttft_s"] for turn in some],
        "of_computed": statistics.median(ratios["ttft_s"]),
        "ttft_cpu_s": statistics.median(turn["cpu_s"] for turn in some),
        "of_computed_cpu": statistics.median(ratios["cpu_s"]),
        "keep_s": stored["ttft_s"],
        "keep_cpu_s": stored["cpu_s"],
        "num_differing": sum(differing),
    }
