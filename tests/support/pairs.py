"""A prefill and a decode engine in one process, joined by a connector, stepped in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.core.errors import LeakError
from kvferry.core.messages.hand_off import Consume, Produce, Ticket, parse_hand_off
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.testing.stepping import IdleWait, early_ticket
from support.engines import Answer, matcher_of

DEADLINE_S = 60.0
"""Far beyond what anything here takes; for a run of prompts, a second more for each of them."""


@dataclass
class Pair:
    """One P and one D."""

    prefill: Engine
    decode: Engine
    num_runs: int = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        form: str,
        *,
        must_load: bool = True,
        on_step: Callable[[], None] = lambda: None,
        addresses: Sequence[dict[str, Any]] | None = None,
    ) -> list[Answer]:
        """Serve prompts, all at once, with a `sequential` or `concurrent` hand-off each; answers in their order.

        `on_step`: called before each step of P. `addresses`: those in early tickets, P's by default.

        `must_load`: fail unless D loads the full blocks of every prompt or has them in its prefix cache. D computes
        what it cannot load, so that equal answers do not show that anything was handed off.
        """
        self.num_runs += 1
        num_found, failures = self._num_found(), self._failures()
        answers = {f"{self.num_runs}-{number}": Answer() for number in range(len(prompts))}
        for name, prompt in zip(answers, prompts, strict=True):
            self.prefill.add(self._request(name, prompt, sampling, Produce(transfer_id=f"t-{name}")))
            if form == "concurrent":
                self.decode.add(
                    self._request(name, prompt, sampling, Consume(self._early_ticket(f"t-{name}", addresses)))
                )
        by_name = dict(zip(answers, prompts, strict=True))
        deadline, rest = time.monotonic() + DEADLINE_S + len(prompts), IdleWait(self.prefill, self.decode)
        while any(answer.last is None or answer.last.finish_reason is None for answer in answers.values()):
            assert time.monotonic() < deadline, "the hand-offs did not end in time"
            on_step()
            for output in self.prefill.step():
                assert output.finish_reason in ("length", "stop"), output
                if form == "sequential":
                    ticket = parse_hand_off(output.kv_transfer_params, output.request_id)
                    prompt = by_name[output.request_id]
                    self.decode.add(self._request(output.request_id, prompt, sampling, ticket))
            for output in self.decode.step():
                answers[output.request_id].add(output)
            rest()
        if must_load:
            size = self.decode.config.block_size
            assert self._failures() == failures
            assert self._num_found() - num_found >= sum(len(prompt) // size * size for prompt in prompts)
        return list(answers.values())

    def _num_found(self) -> int:
        """Number of prompt tokens that D had, or began to load."""
        statistics = self.decode.statistics()
        return statistics.scheduler.num_prefix_hits + statistics.external_kv.num_external_hits

    def _failures(self) -> dict[str, int]:
        return self.decode.statistics().external_kv.num_load_failures

    def settle(self) -> None:
        """Step until neither side keeps anything; `LeakError` says what, when that does not happen in time."""
        deadline, rest = time.monotonic() + DEADLINE_S, IdleWait(self.prefill, self.decode)
        while True:
            self.prefill.step()
            self.decode.step()
            try:
                self._require_nothing_kept()
            except LeakError:
                if time.monotonic() > deadline:
                    raise
                rest()
            else:
                return

    def _require_nothing_kept(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.check()
            engine.pool.check()

    def _early_ticket(self, transfer_id: str, addresses: Sequence[dict[str, Any]] | None) -> Ticket:
        return early_ticket(transfer_id, addresses or self.prefill.addresses, self.prefill.scheduler_side)

    def _request(self, name: str, prompt: Sequence[int], sampling: SamplingParams, hand_off: Any) -> Request:
        matcher = matcher_of(self.prefill, sampling)
        return Request(
            request_id=name, prompt_token_ids=list(prompt), sampling=sampling, matcher=matcher, hand_off=hand_off
        )


@contextmanager
def pair_of(
    model: Path,
    connector: str,
    *,
    extra: dict[str, Any],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    role: str | None = None,
    **transfer: Any,
) -> Iterator[Pair]:
    """A pair on `model`; `prefill` and `decode` are engine settings. `role`: both have this one."""
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "64MiB", "max_num_seqs": 16}

    def engine(role: str, settings: dict[str, Any]) -> Engine:
        config = KVTransferConfig(
            kv_connector=connector,
            kv_role=role,
            kv_connector_extra_config=extra,
            **transfer,  # type: ignore[arg-type]
        )
        return Engine(EngineConfig(model=str(model), **{**defaults, **settings}), config, auth_token="test")

    producer = engine(role or "kv_producer", prefill)
    try:
        consumer = engine(role or "kv_consumer", decode)
        try:
            yield Pair(producer, consumer)
        finally:
            consumer.close()
    finally:
        producer.close()
