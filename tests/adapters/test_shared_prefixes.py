"""Many at once that share prefixes: blocks that vLLM counts as cached are still computed, by another request of the
same step. What is handed off is what was computed, and never what lay there before.

`KVFERRY_SHARED_ANSWERS` says how many answers each test asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import ModelMaker, connector
from support.shared_prefixes import num_answers, waves
from support.vllm_process import VllmProcess, early_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(1800)]

P2P = "KvferryP2pConnector"
MANY = {"max_num_batched_tokens": 8192, "max_num_seqs": 32}
BLOCK_BYTES = 49152


@dataclass(frozen=True)
class Setting:
    """How a pair is started: `longest` prompt and `num_tokens` of answers; beside `MANY`, what both are told."""

    longest: int
    num_tokens: int = 6
    architecture: str = "llama"
    args: dict[str, Any] = field(default_factory=dict)
    store: bool = False
    """Whether both keep blocks in one shared storage too, in vLLM's MultiConnector, in which no load is layer by
    layer, though it is asked for."""


GUESSES = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
SETTINGS = {
    "whole prompts": Setting(2400),
    "chunks": Setting(2400, args={"max_num_batched_tokens": 256}),
    "tight": Setting(500, 50, args={"kv_cache_memory_bytes": 72 * BLOCK_BYTES, "max_model_len": 1024}),
    "windows": Setting(1000, architecture="gemma3"),
    "store": Setting(1600, store=True),
    "guesses": Setting(700, 20, args=GUESSES, store=True),
}


@dataclass
class Started:
    """A producer, a consumer, and a vLLM without a connector; `num` prompts have been handed off."""

    setting: Setting
    prefill: VllmProcess
    decode: VllmProcess
    plain: VllmProcess
    address: dict[str, Any]
    store: Path
    num: int = 0

    def names(self, wave: Sequence[object]) -> list[str]:
        """A transfer id for each."""
        self.num += len(wave)
        return [f"shared-{self.num - index}" for index in range(len(wave))]


Start = Callable[..., VllmProcess]


@pytest.fixture(scope="module")
def start(make_model: ModelMaker) -> Iterator[Start]:
    """`start(setting, kv_transfer)`; plain ones are started once for each model."""
    plain: dict[str, VllmProcess] = {}
    with ExitStack() as stack:

        def start(setting: Setting, transfer: dict[str, Any] | None, **args: Any) -> VllmProcess:
            if transfer is None and setting.architecture in plain:
                return plain[setting.architecture]
            process = VllmProcess(make_model(setting.architecture), transfer, **{**MANY, **args})
            stack.callback(process.close)
            if transfer is None:
                plain[setting.architecture] = process.ready()
            return process

        yield start


SHORT = ("whole prompts", "windows")
PARAMETERS = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.full]) for name in SETTINGS]


@pytest.fixture(scope="module", params=PARAMETERS)
def started(
    request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    setting, store = SETTINGS[request.param], tmp_path_factory.mktemp("store")
    plain = start(setting, None)
    pair = [
        start(setting, transfer_of(setting, role, store), **setting.args) for role in ("kv_producer", "kv_consumer")
    ]
    prefill, decode = (process.ready() for process in pair)
    yield Started(setting, prefill, decode, plain, early_ticket(prefill, decode, "address"), store)
    prefill.close()
    decode.close()


def transfer_of(setting: Setting, role: str, store: Path) -> dict[str, Any]:
    if not setting.store:
        return connector(P2P, role)
    storage = {"shared_storage_path": str(store), "load": "layerwise", "hand_off": False}
    children = [connector(P2P, role), connector("KvferrySharedStorageConnector", "kv_both", **storage)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("form", ["concurrent", "sequential"])
def test_answers_are_those_of_plain_vllm(started: Started, form: str) -> None:
    wrong = []
    hand_off = at_once if form == "concurrent" else one_after_the_other
    for wave in waves(num_answers(60), started.setting.longest, seed=1 if form == "concurrent" else 2):
        if started.setting.store:
            keep_and_damage(started, wave)
        plain = [started.plain.add(prompt, started.setting.num_tokens) for prompt in wave]
        found = [started.decode.wait(name).token_ids for name in hand_off(started, wave)]
        expected = [started.plain.wait(name).token_ids for name in plain]
        wrong += [f"{a} {b}" for a, b in zip(found, expected, strict=True) if a != b]
    assert not wrong
    started.prefill.settled()
    state = started.decode.settled()
    assert state.figures["taken"], state
    if started.setting.store:
        loads = started.prefill.state().figures
        assert min(loads["loads"], loads["failed_StoreError"]) > 0, loads
    if started.setting.num_tokens > 20:
        assert state.preemptions + started.prefill.state().preemptions > 0, "nothing was preempted"


def at_once(started: Started, wave: Sequence[Sequence[int]]) -> list[str]:
    """D asks before P has begun, and all of P's are there before it makes a step."""
    names = started.names(wave)
    tickets = [started.address | {"transfer_id": name} for name in names]
    tokens = started.setting.num_tokens
    decodes = [started.decode.add(prompt, tokens, ticket) for prompt, ticket in zip(wave, tickets, strict=True)]
    prefill_all(started, wave, names)
    return decodes


def one_after_the_other(started: Started, wave: Sequence[Sequence[int]]) -> list[str]:
    """D is asked when P has answered."""
    tickets = prefill_all(started, wave, started.names(wave))
    tokens = started.setting.num_tokens
    return [started.decode.add(prompt, tokens, ticket) for prompt, ticket in zip(wave, tickets, strict=True)]


def prefill_all(started: Started, wave: Sequence[Sequence[int]], names: Sequence[str]) -> list[dict[str, Any] | None]:
    """P answers some others too, which no hand-off is of, and which share prefixes with those that are handed off."""
    started.prefill.ask("freeze")
    others = [started.prefill.add(prompt, started.setting.num_tokens) for prompt in wave[::5]]
    params = [{"do_remote_decode": True, "transfer_id": name} for name in names]
    prefills = [started.prefill.add(prompt, 1, one) for prompt, one in zip(wave, params, strict=True)]
    started.prefill.ask("thaw")
    tickets = [started.prefill.wait(name).kv_transfer_params for name in prefills]
    for name in others:
        started.prefill.wait(name)
    return tickets


def keep_and_damage(started: Started, wave: Sequence[Sequence[int]]) -> None:
    """All of the wave is in the store, and in no prefix cache. That some blocks are damaged is found out while the
    model runs on them."""
    for name in [started.prefill.add(prompt, 1) for prompt in wave]:
        started.prefill.wait(name)
    for process in (started.prefill, started.decode):
        process.settled()
        process.ask("reset_prefix_cache")
    for path in sorted(started.store.glob("*/??/*.kv"))[::9]:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
