"""The reason why vLLM did not start, from logs as vLLM 0.32 writes them."""

from __future__ import annotations

import sys

import pytest

from fleet.fleets import run
from fleet.recording import RecordingDisplay
from kvferry.fleet.processes.exit_reason import ExitCause
from kvferry.fleet.processes.process import ExternalServer, ProcessSpec

WORKER = "(Worker pid=22390) ERROR 11-23 23:02:08 [multiproc_executor.py:1063] "
ENGINE = "(EngineCore pid=21563) ERROR 11-23 23:02:08 [core.py:1510] "
FAILED = [
    "(Worker pid=22390) INFO 11-23 23:02:08 [factory.py:57] Creating offloading spec with name: CPUOffloadingSpec",
    WORKER + "WorkerProc hit an exception.",
    WORKER + "Traceback (most recent call last):",
    WORKER + '  File "/v/vllm/v1/kv_offload/cpu/spec.py", line 98, in __init__',
    WORKER + "    raise Exception(",
    WORKER + "    ^^^^^^^^^^^^^^^^",
    WORKER + "{}",
    ENGINE + "EngineCore failed to start.",
    ENGINE + "Traceback (most recent call last):",
    ENGINE + '  File "/v/vllm/v1/executor/multiproc_executor.py", line 444, in get_response',
    ENGINE + "    raise RuntimeError(",
    ENGINE + "RuntimeError: Worker failed with error, please check the stack trace above for the root cause",
    "Traceback (most recent call last):",
    '  File "<frozen runpy>", line 198, in _run_module_as_main',
    "RuntimeError: Engine core initialization failed. See root cause above.",
]
HARMLESS = [
    "(APIServer pid=7) WARNING 11-23 23:02:08 [registry.py:7] Traceback (most recent call last):",
    "(APIServer pid=7) WARNING 11-23 23:02:08 [registry.py:7] ImportError: no such thing, and none is needed",
]
INTERLEAVED = [
    "(Worker_TP0 pid=1) ERROR 11-23 23:02:08 [m.py:1] Traceback (most recent call last):",
    "(Worker_TP1 pid=2) ERROR 11-23 23:02:08 [m.py:1] Traceback (most recent call last):",
    '(Worker_TP0 pid=1) ERROR 11-23 23:02:08 [m.py:1]   File "/v/a.py", line 3, in a',
    "(Worker_TP1 pid=2) INFO 11-23 23:02:08 [m.py:1] something else: of no interest",
    "(Worker_TP0 pid=1) ERROR 11-23 23:02:08 [m.py:1] AssertionError",
]
PYDANTIC = [
    "Traceback (most recent call last):",
    "    config = VllmConfig(",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
    "  Value error, Unsupported connector type: Mine [type=value_error, input_value=ArgsKwargs((), {'m...0})]",
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
]


def with_exception(text: str, *before: str) -> list[str]:
    return [*before, *(line.replace("{}", text) for line in FAILED)]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            with_exception("Exception: cpu_bytes_to_use must be specified"),
            "Exception: cpu_bytes_to_use must be specified",
        ),
        (with_exception("kvferry.core.errors.ConfigError: two: words", *HARMLESS), "ConfigError: two: words"),
        (
            with_exception("nixl._b.nixlNotFoundError: NOT_FOUND", "E1123 23:04:16.9 256 a.cpp:3] unsupported 'GDS'"),
            "unsupported 'GDS' (nixlNotFoundError: NOT_FOUND)",
        ),
        (PYDANTIC, "ValidationError: 1 validation error for VllmConfig: Value error, Unsupported connector type: Mine"),
        (INTERLEAVED, "AssertionError in /v/a.py:3"),
        (["usage: main.py [-h]", "main.py: error: unrecognized arguments: --no"], "unrecognized arguments: --no"),
        ([*HARMLESS, "INFO:     Application shutdown complete."], ""),
    ],
)
def test_the_first_cause_is_found(lines: list[str], cause: str) -> None:
    found = ExitCause()
    for line in lines:
        found.feed(line)
    assert found.text == cause


async def test_it_is_told_instead_of_the_last_lines() -> None:
    program = "raise SystemExit('Traceback (most recent call last):\\n  frame\\nValueError: the cause\\nmore\\n')"
    spec = ProcessSpec("engine", (sys.executable, "-c", program), foreign=ExternalServer("http://127.0.0.1:9"))
    display = RecordingDisplay()
    assert await run(display, {"both": lambda name: spec}) == 1
    assert display.of("note") == [["error: both-0 ended with exit code 1 while starting: ValueError: the cause"]]
