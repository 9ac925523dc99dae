"""The scheduler alone, driven by a rule in place of a model: the next token is the sum of the known ones, mod 97."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ordered
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Pending,
    Prefilled,
    Release,
    Released,
    RequestView,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferReport,
    failures,
)
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.clock import ManualClock
from kvferry.core.errors import InvalidRequest, LeaseEnded, PeerLost, QueueFull
from kvferry.core.messages.hand_off import Consume, PrefillResult, Produce, Ticket
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams, sampling_digest
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.cached_order import CachedOrder, PolicyOrder, ReleaseOrder
from kvferry.engine.scheduling.limits import SchedulerLimits
from kvferry.engine.scheduling.scheduler import Scheduler
from kvferry.engine.scheduling.step import SampledToken, Step
from kvferry.store.eviction.fifo import Fifo

BLOCK = 4


def rule(tokens: Ordered[int]) -> int:
    return sum(tokens) % 97


def prefilled(token: int, model: str = "model", sampling: SamplingParams | None = None) -> PrefillResult:
    """The result of a prefill instance with this model and these sampling parameters."""
    return PrefillResult(first_token=token, seed=3, drawn_by=sampling_digest(model, sampling or SamplingParams(), ()))


def expected_answer(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(rule(tokens))
    return tokens[len(prompt) :]


class ScriptedConnector(SchedulerSide):
    """Answers `match` and `finish` as the test says, and remembers what it was told."""

    def __init__(self, match: Match = Miss(), finish: Finish = Release()) -> None:  # noqa: B008 - frozen values
        layout = KVLayout(model_fingerprint="m", layers=(LayerLayout(1, 1, 1),), dtype="float32", block_size=BLOCK)
        super().__init__(ConnectorContext(KVTransferConfig(kv_connector="scripted"), layout))
        self.match_answer, self.finish_answer = match, finish
        self.matched: list[str] = []
        self.allocations: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.arrivals: list[str] = []
        self.num_plans = 0

    def arrived(self, request: RequestView) -> None:
        self.arrivals.append(request.request_id)

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        self.matched.append(request.request_id)
        return self.match_answer

    def allocated(self, request: RequestView, block_ids: Ordered[int], num_computed_tokens: int, hit: Hit) -> None:
        self.allocations[request.request_id] = list(block_ids)

    def plan(self, step: StepView) -> StepPlan:
        self.num_plans += 1
        self.preempted += [request.request_id for request in step.preempted]

    def completed(self, report: TransferReport) -> None:
        pass

    def finish(self, request: RequestView, block_ids: Ordered[int]) -> Finish:
        self.finished.append(request.request_id)
        return self.finish_answer


class Bench:
    """A scheduler and the rule that stands for the model."""

    def __init__(
        self,
        num_blocks: int = 64,
        connector: SchedulerSide | None = None,
        order: CachedOrder | None = None,
        **limits: Any,
    ) -> None:
        settings = {
            "block_size": BLOCK,
            "max_model_len": 200,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_waiting": 32,
        }
        self.clock = ManualClock()
        self.pool = BlockPool(num_blocks, order=order)
        self.scheduler = Scheduler(SchedulerLimits(**{**settings, **limits}), self.pool, "model", self.clock, connector)
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.steps: list[Step] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4, **others: Any) -> None:
        sampling = others.pop("sampling", SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **others))

    def step(self, report: TransferReport | None = None) -> Step:
        step = self.scheduler.schedule()
        self.steps.append(step)
        sampled = {
            chunk.sequence.request_id: [SampledToken(rule(chunk.sequence.tokens))]
            for chunk in step.chunks
            if chunk.samples
        }
        report = self.scheduler.fail_incomplete_loads(step.chunks, report or [])
        self.scheduler.update(step, sampled, failures(report))
        if report:
            self.scheduler.on_transferred(report)
        for output in self.scheduler.take_outputs():
            self.outputs.setdefault(output.request_id, []).append(output)
        return step

    def run(self, limit: int = 2_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("the scheduler never finished")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last(self, request_id: str) -> EngineOutput:
        return self.outputs[request_id][-1]


def test_one_request_runs_to_its_length() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=6)
    bench.run()
    assert bench.tokens("a") == expected_answer([1, 2, 3], 6)
    assert bench.last("a").finish_reason == "length"
    bench.scheduler.check()


def test_long_prompts_are_cut_into_chunks_within_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", list(range(30)), max_tokens=1)
    bench.run()
    assert [step.num_tokens for step in bench.steps] == [8, 8, 8, 6]
    assert bench.tokens("a") == expected_answer(list(range(30)), 1)


def test_prompts_beside_answers_are_cut_to_the_target_between_tokens() -> None:
    """The clock moves a second for each token of a prompt."""
    bench = Bench(num_blocks=256, max_num_batched_tokens=64, max_model_len=400, itl_target_s=40.0)
    bench.add("a", [1, 2, 3], max_tokens=100)
    bench.add("b", list(range(300)), max_tokens=1)
    while "b" not in bench.outputs:
        step = bench.step()
        bench.scheduler.record_step_duration(
            step, float(sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)) or 0.1
        )
    sizes = [step.num_tokens for step in bench.steps]
    assert sizes[0] == 64, "no answer runs yet"
    assert set(sizes[1:-1]) == {1 + 32}, "four fifths of the target"
    assert len(bench.tokens("a")) == len(sizes), "a token of the answer in each step"


def test_decodes_come_before_prefill_chunks() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", [1, 2], max_tokens=10)
    bench.step()
    bench.add("b", list(range(40)), max_tokens=1)
    step = bench.step()
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks] == [("a", 1), ("b", 7)]


def test_more_urgent_requests_go_first() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("late", [1], priority=5)
    bench.add("soon", [2], priority=-1)
    bench.run()
    order = [step.chunks[0].sequence.request_id for step in bench.steps if step.chunks]
    assert order == ["soon"] * 4 + ["late"] * 4


def test_a_shared_prefix_is_computed_once() -> None:
    bench = Bench()
    prompt = list(range(13))
    bench.add("a", prompt)
    bench.run()
    bench.add("b", [*prompt[:12], 50])
    step = bench.step()
    assert step.num_tokens == 1
    assert bench.last("b").num_cached_tokens == 12


def test_the_order_of_eviction_hears_of_whole_answers_only() -> None:
    order = HearsAnswers()
    bench = Bench(order=order, connector=ScriptedConnector())
    bench.add("whole", list(range(9)), max_tokens=3)
    bench.add("left", list(range(20, 29)), max_tokens=50)
    bench.add("handed off", list(range(40, 49)), hand_off=Produce("t"))
    while "whole" not in bench.outputs or bench.last("whole").finish_reason is None:
        bench.step()
    bench.scheduler.abort("left")
    bench.run()
    assert order.heard == [(2, 3)]


class HearsAnswers(ReleaseOrder):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, int]] = []

    def finished(self, names: Ordered[bytes], num_output_tokens: int) -> None:
        self.heard.append((len(names), num_output_tokens))


@pytest.mark.parametrize("mistake", ["insert", "access", "pin", "unpin", "evict", "finish", "__len__", "__contains__"])
def test_an_eviction_policy_that_raises_costs_no_request(mistake: str) -> None:
    def raises(*_: object) -> int:
        raise KeyError("a mistake of the policy's")

    mistaken = type("Mistaken", (Fifo,), {mistake: raises})
    bench = Bench(num_blocks=8, order=PolicyOrder(mistaken(8), ManualClock()))
    prompts = {name: [ord(name)] * 9 for name in "abcd"}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=5)
        bench.step()
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_answer(prompt, 5)
    assert bench.scheduler.num_faults == 0
    bench.scheduler.audit()
    bench.scheduler.check()


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    bench = Bench()
    bench.add("a", list(range(8)), max_tokens=1)
    bench.run()
    bench.add("b", list(range(8)), max_tokens=1)
    assert bench.step().num_tokens == 4
    assert bench.tokens("b") == bench.tokens("a")


def test_cache_salt_separates() -> None:
    bench = Bench()
    bench.add("a", list(range(8)), cache_salt="x")
    bench.run()
    bench.add("b", list(range(8)), cache_salt="y")
    assert bench.step().num_tokens == 8


def test_preemption_recomputes_and_changes_no_token() -> None:
    bench = Bench(num_blocks=8)
    prompts = {name: [ord(name)] * 8 for name in "abc"}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=16)
    bench.run()
    assert bench.scheduler.statistics().num_preemptions > 0
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_answer(prompt, 16)
    bench.scheduler.check()


def test_the_least_urgent_is_preempted() -> None:
    bench = Bench(num_blocks=6)
    bench.add("first", [1] * 8, max_tokens=12)
    bench.add("second", [2] * 8, max_tokens=12)
    bench.run()
    finished = {name: len(outputs) for name, outputs in bench.outputs.items()}
    assert finished == {"first": 12, "second": 12}
    done = [step for step in bench.steps if any(c.sequence.request_id == "first" for c in step.chunks)]
    assert len(done) == 12  # `first` was never interrupted


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    bench = Bench(num_blocks=4)
    with pytest.raises(InvalidRequest, match="maximum context length is 200"):
        bench.add("a", [1] * 200)
    with pytest.raises(InvalidRequest, match="may reach 20 tokens, the KV cache holds 16"):
        bench.add("b", [1] * 10, max_tokens=10)
    with pytest.raises(InvalidRequest, match="empty"):
        bench.add("c", [])


def test_a_full_queue_refuses() -> None:
    bench = Bench(max_waiting=2)
    bench.add("a", [1])
    bench.add("b", [1])
    with pytest.raises(QueueFull):
        bench.add("c", [1])
    bench.run()
    bench.add("c", [1])


def test_a_used_request_id_is_refused() -> None:
    bench = Bench()
    bench.add("a", [1])
    with pytest.raises(InvalidRequest, match="in use"):
        bench.add("a", [1])


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_abort_frees_at_once(steps_before: int) -> None:
    bench = Bench()
    bench.add("a", list(range(20)), max_tokens=50)
    for _ in range(steps_before):
        bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.check()
    assert bench.pool.num_free == bench.pool.num_blocks
    bench.step()
    assert bench.last("a").finish_reason == "abort"


def test_a_passed_deadline_is_a_named_error() -> None:
    bench = Bench()
    bench.add("a", [1, 2], max_tokens=50, deadline=10.0)
    bench.step()
    bench.clock.advance(11)
    bench.step()
    assert type(bench.last("a").error).__name__ == "DeadlineExceeded"
    bench.scheduler.check()


def test_stop_token_ends_the_answer_and_is_named() -> None:
    answer = expected_answer([5, 6], 4)
    bench = Bench()
    bench.add("a", [5, 6], sampling=SamplingParams(max_tokens=9, stop_token_ids=(answer[2],)))
    bench.run()
    assert bench.tokens("a") == answer[:3]
    assert (bench.last("a").finish_reason, bench.last("a").stop_reason) == ("stop", answer[2])


def test_eos_stops_unless_ignored_or_too_early() -> None:
    answer = expected_answer([5, 6], 6)
    eos = frozenset({answer[1]})
    for sampling, length in (
        (SamplingParams(max_tokens=6), 2),
        (SamplingParams(max_tokens=6, ignore_eos=True), 6),
        (SamplingParams(max_tokens=6, min_tokens=3), 6),
    ):
        bench = Bench(eos_token_ids=eos)
        bench.add("a", [5, 6], sampling=sampling)
        bench.run()
        assert len(bench.tokens("a")) == length


def test_prompt_logprobs_skip_the_prefix_cache() -> None:
    bench = Bench()
    bench.add("a", list(range(12)))
    bench.run()
    bench.add("b", list(range(12)), sampling=SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert bench.step().num_tokens == 12


# Beyond the trained context all KV is computed otherwise. It is 12 tokens here.


def test_a_sequence_that_leaves_the_trained_context_begins_again_once() -> None:
    bench = Bench(trained_context=12)
    bench.add("a", list(range(10)), max_tokens=6)
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 6)
    assert [step.num_tokens for step in bench.steps if step.chunks] == [10, 1, 1, 13, 1, 1]
    statistics = bench.scheduler.statistics()
    assert (statistics.num_context_recomputes, statistics.num_preemptions) == (1, 0)
    bench.scheduler.check()


def test_a_sequence_that_ends_at_the_border_does_not() -> None:
    bench = Bench(trained_context=12)
    bench.add("a", list(range(10)), max_tokens=3)
    bench.run()
    assert bench.scheduler.statistics().num_context_recomputes == 0


def test_blocks_within_the_trained_context_are_no_prefix_of_a_longer_sequence() -> None:
    bench = Bench(trained_context=12)
    for number, prompt in enumerate([list(range(9)), list(range(14)), list(range(9)), list(range(15))]):
        bench.add(f"{number}", prompt, max_tokens=1)
        bench.run()
    assert [step.num_tokens for step in bench.steps if step.chunks] == [9, 14, 1, 3]


@pytest.mark.parametrize("num_offered", [0, 12])
def test_kv_of_the_other_kind_is_not_fetched(num_offered: int) -> None:
    """P has computed 12 tokens, D is asked for more; or P's own token takes the sequence across the border."""
    connector = ScriptedConnector(match=Hit(12))
    bench = Bench(connector=connector, trained_context=12)
    prompt = list(range(14)) if num_offered else list(range(12))
    result = prefilled(rule(prompt))
    ticket = Ticket(transfer_id="t", remote_num_tokens=num_offered, prefill_result=None if num_offered else result)
    bench.add("a", prompt, hand_off=Consume(ticket))
    bench.run()
    assert bench.tokens("a") == expected_answer(prompt, 4)
    assert connector.matched == []
    bench.scheduler.check()


def test_kv_that_came_of_the_other_kind_is_computed_anew() -> None:
    """In a concurrent hand-off P's token, or how much it has computed, is known only when the KV is there."""
    event = Prefilled("a", prefilled(rule(range(12))))
    reports: list[TransferReport] = [[event, Loaded("a")], [Loaded("a", 8)]]
    for report in reports:
        is_whole = event in report
        prompt = list(range(12 if is_whole else 14))
        bench = Bench(connector=ScriptedConnector(match=Hit(len(prompt))), trained_context=12)
        bench.add("a", prompt, hand_off=consume(None))
        bench.step()
        bench.step(report)
        bench.run()
        assert bench.tokens("a") == expected_answer(prompt, 4)
        assert len(prompt) + is_whole in [step.num_tokens for step in bench.steps]
        bench.scheduler.check()


# Hand-offs.

RESULT = prefilled(rule(range(10)))


def consume(result: PrefillResult | None) -> Consume:
    return Consume(Ticket(transfer_id="t", prefill_result=result))


def test_a_producer_answers_one_token_and_a_ticket_and_keeps_its_blocks() -> None:
    connector = ScriptedConnector(finish=Hold({"transfer_id": "t"}))
    bench = Bench(connector=connector)
    bench.add("a", list(range(10)), max_tokens=9, hand_off=Produce("t"))
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 1)
    assert bench.last("a").kv_transfer_params == {"transfer_id": "t"}
    bench.pool.check(num_held=3)
    bench.step([Released("a")])
    bench.scheduler.check()


def test_a_consumer_shows_the_first_token_before_any_kv() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(RESULT))
    bench.step()
    assert bench.tokens("a") == [RESULT.first_token]
    assert not bench.steps[-1].chunks


def test_a_consumer_decodes_without_computing_any_prompt_token() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(RESULT))
    bench.step()
    bench.step([Loaded("a")])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    assert all(step.num_tokens <= 1 for step in bench.steps)
    bench.scheduler.check()


def test_the_token_of_a_prefix_is_not_the_answer_s() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(6)))
    ticket = Ticket(transfer_id="t", remote_num_tokens=6, prefill_result=RESULT)
    bench.add("a", list(range(10)), hand_off=Consume(ticket))
    bench.step()
    assert "a" not in bench.outputs
    bench.step([Loaded("a")])
    assert bench.step().num_tokens == 4
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)


def test_fewer_tokens_may_come_than_were_promised() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(None))
    bench.step()
    bench.step([Loaded("a", 3)])
    assert bench.step().num_tokens == 7
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    bench.scheduler.check()


@pytest.mark.parametrize("comes_at", ["before the meeting", "at the meeting"])
@pytest.mark.parametrize(("num_loaded", "first_after"), [(2, 8), (8, 8), (12, 12), (13, 13), (None, 16), (99, 16)])
def test_fewer_tokens_may_come_than_were_to_be_met(comes_at: str, num_loaded: int | None, first_after: int) -> None:
    """What did not come is computed, not believed, whether the load ends before the front is computed or after it."""
    bench = Bench(connector=ScriptedConnector(match=Hit(16, num_computed_meanwhile=8)), max_num_batched_tokens=4)
    bench.add("a", list(range(20)))
    [chunk] = bench.step().chunks
    sequence = chunk.sequence
    if comes_at == "at the meeting":
        bench.step()
        assert bench.scheduler.external_kv.num_loading == 1
    bench.scheduler.on_transferred([Loaded("a", num_loaded)])
    if comes_at == "before the meeting":
        bench.step()
    assert (sequence.num_computed_tokens, sequence.hash_chain.num_cached_blocks) == (first_after, first_after // BLOCK)
    assert bench.step().chunks[0].start == first_after
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(20)), 4)
    bench.scheduler.check()


def test_the_connector_hears_of_a_request_that_must_wait() -> None:
    connector = ScriptedConnector()
    bench = Bench(connector=connector, max_num_seqs=1)
    bench.add("a", [1, 2, 3])
    bench.add("b", [1, 2, 3])
    bench.step()
    assert (connector.arrivals, connector.matched) == (["a", "b"], ["a"])


def test_a_concurrent_hand_off_brings_the_token_with_the_transfer() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(None))
    bench.step()
    bench.step([Prefilled("a", RESULT), Loaded("a")])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    assert all(step.num_tokens <= 1 for step in bench.steps)


@pytest.mark.parametrize("ended", [[Loaded("a")], [Failed("a", PeerLost("gone"))]])
def test_a_concurrent_hand_off_may_bring_the_token_before_the_kv(ended: TransferReport) -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(None))
    bench.step()
    bench.step([Prefilled("a", RESULT)])
    assert bench.tokens("a") == [RESULT.first_token]
    bench.step(ended)
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    bench.scheduler.check()


def test_an_answer_of_one_token_ends_before_the_kv_has_come() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(None), max_tokens=1)
    bench.step()
    bench.step([Prefilled("a", RESULT)])
    assert bench.tokens("a") == [RESULT.first_token]
    bench.step([Loaded("a")])
    bench.scheduler.check()


def test_a_prefill_that_is_over_is_planned_for_at_once() -> None:
    connector = ScriptedConnector(finish=Hold(None))
    bench = Bench(connector=connector)
    bench.add("a", [1, 2, 3], max_tokens=1)
    bench.scheduler.plan_between_steps()
    assert connector.num_plans == 0
    bench.step()
    bench.scheduler.plan_between_steps()
    assert connector.num_plans == 2
    bench.scheduler.plan_between_steps()
    assert connector.num_plans == 2
    bench.step([Released("a")])
    bench.scheduler.check()


def test_kv_without_the_token_recomputes_only_the_last_one() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)))
    bench.step()
    bench.step([Loaded("a")])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    assert all(step.num_tokens <= 1 for step in bench.steps)


def test_a_first_token_that_ends_the_answer_needs_no_kv() -> None:
    connector = ScriptedConnector(match=Hit(10))
    bench = Bench(connector=connector)
    bench.add("a", list(range(10)), max_tokens=1, hand_off=consume(RESULT))
    bench.run()
    assert bench.last("a").finish_reason == "length"
    assert connector.finished == ["a"]
    assert connector.allocations == {}
    bench.scheduler.check()


OTHERS = [
    prefilled(96, model="another model"),
    prefilled(96, sampling=SamplingParams(temperature=0.5)),
    PrefillResult(first_token=96, seed=3),
]


@pytest.mark.parametrize("result", OTHERS)
@pytest.mark.parametrize("form", ["sequential", "concurrent", "failed"])
def test_a_token_that_would_not_have_been_drawn_here_is_drawn_again(result: PrefillResult, form: str) -> None:
    """Whether the ticket brings it or the transfer, and whatever becomes of the KV; it is counted once."""
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(result if form == "sequential" else None))
    bench.step()
    ended: list[Any] = [Failed("a", PeerLost("gone"))] if form == "failed" else [Loaded("a")]
    bench.step([Prefilled("a", result)])
    assert "a" not in bench.outputs
    bench.step([Prefilled("a", result), *ended])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    assert bench.scheduler.statistics().num_tokens_not_adopted == 1
    bench.scheduler.check()


def test_a_producer_says_what_drew_its_token() -> None:
    results: list[PrefillResult | None] = []

    class Noting(ScriptedConnector):
        def finish(self, request: RequestView, block_ids: Ordered[int]) -> Finish:
            results.append(request.prefill_result)
            return super().finish(request, block_ids)

    bench = Bench(connector=Noting())
    sampling = SamplingParams(max_tokens=1, temperature=0.5)
    bench.add("a", list(range(10)), sampling=sampling, hand_off=Produce("t"))
    bench.run()
    assert results[0] is not None
    assert results[0].drawn_by == sampling_digest("model", sampling, ())


@pytest.mark.parametrize("result", [RESULT, None])
def test_a_failed_load_is_recomputed(result: PrefillResult | None) -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(10)))
    bench.add("a", list(range(10)), hand_off=consume(result))
    bench.step()
    bench.step([Failed("a", LeaseEnded("gone"))])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    assert bench.scheduler.external_kv.statistics().num_load_failures == {"LeaseEnded": 1}
    bench.scheduler.check()


@pytest.mark.parametrize("match", [Hit(10), Miss(LeaseEnded("gone"))])
def test_a_lost_hand_off_fails_where_the_policy_says_so(match: Match) -> None:
    bench = Bench(connector=ScriptedConnector(match=match), fail_on_load_failure=True)
    bench.add("a", list(range(10)), hand_off=consume(RESULT))
    bench.step()
    if isinstance(match, Hit):
        bench.step([Failed("a", LeaseEnded("gone"))])
    bench.run()
    assert type(bench.last("a").error).__name__ == "HandOffFailed"
    bench.scheduler.check()


def test_a_prefill_goes_on_without_an_earlier_turn_s_kv() -> None:
    """It is a saving, not the request's point."""
    bench = Bench(connector=ScriptedConnector(match=Hit(6)), fail_on_load_failure=True)
    source = Ticket(transfer_id="kept", remote_host="d", remote_port=5)
    bench.add("a", list(range(10)), hand_off=Produce("t", source))
    bench.step()
    bench.step([Failed("a", LeaseEnded("gone"))])
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 1)
    assert bench.last("a").error is None


def test_pending_requests_let_others_pass() -> None:
    connector = ScriptedConnector(match=Pending())
    bench = Bench(connector=connector)
    bench.add("a", list(range(10)))
    bench.step()
    connector.match_answer = Miss()
    bench.add("b", [1, 2])
    connector_asked = len(connector.matched)
    bench.run()
    assert len(connector.matched) > connector_asked
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)


def test_a_failed_layerwise_load_takes_the_step_back() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(8, layerwise=True)))
    bench.add("a", list(range(10)))
    bench.step([Failed("a", LeaseEnded("corrupt"))])
    assert "a" not in bench.outputs
    assert bench.pool.match([b"x"]) == []
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    bench.scheduler.check()


def test_a_layerwise_load_computes_the_rest_in_the_same_step() -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(8, layerwise=True)))
    bench.add("a", list(range(10)))
    assert bench.step([Loaded("a")]).num_tokens == 2
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)


@pytest.mark.parametrize("report", [[Loaded("a", 7)], []], ids=["short", "not reported"])
def test_a_layerwise_load_that_is_not_reported_whole_has_failed(report: TransferReport) -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(8, layerwise=True)))
    bench.add("a", list(range(10)))
    bench.step(report)
    assert "a" not in bench.outputs
    assert bench.scheduler.external_kv.statistics().num_load_failures == {"TransferError": 1}
    bench.run()
    assert bench.tokens("a") == expected_answer(list(range(10)), 4)
    bench.scheduler.check()


@pytest.mark.parametrize(
    ("hit", "report", "num_cached"),
    [
        (Hit(8), [Loaded("a")], 8),
        (Hit(8), [Loaded("a", 3)], 3),
        (Hit(8), [Failed("a", LeaseEnded("lost"))], 0),
        (Hit(10), [Loaded("a")], 9),  # the last prompt token is computed, for its logits
        (Hit(8, num_computed_meanwhile=4), [Loaded("a")], 4),
        (Hit(8, layerwise=True), [Loaded("a")], 8),
        (Hit(8, layerwise=True), [Failed("a", LeaseEnded("lost"))], 0),
    ],
)
def test_what_a_store_supplied_counts_as_cached(hit: Hit, report: TransferReport, num_cached: int) -> None:
    bench = Bench(connector=ScriptedConnector(match=hit))
    bench.add("a", list(range(10)), hand_off=Produce("t"))
    if hit.layerwise:
        bench.step(report)
    else:
        bench.step()
        bench.step(report)
    bench.run()
    assert {output.num_cached_tokens for output in bench.outputs["a"]} == {num_cached}


@pytest.mark.parametrize(("result", "num_cached"), [(None, 0), (replace(RESULT, num_cached_tokens=5), 5)])
def test_what_came_with_a_hand_off_counts_as_cached_only_where_it_was_at_p(
    result: PrefillResult | None, num_cached: int
) -> None:
    bench = Bench(connector=ScriptedConnector(match=Hit(8)))
    bench.add("a", list(range(10)), hand_off=consume(result))
    bench.step()
    bench.step([Loaded("a")])
    bench.run()
    assert bench.last("a").num_cached_tokens == num_cached


def test_aborting_a_loading_request_leaves_its_blocks_with_the_connector() -> None:
    connector = ScriptedConnector(match=Hit(10), finish=Hold(None))
    bench = Bench(connector=connector)
    bench.add("a", list(range(10)))
    bench.step()
    bench.scheduler.abort("a")
    bench.pool.check(num_held=3)
    bench.step([Released("a")])
    bench.scheduler.check()


def test_preempted_requests_are_told_to_the_connector() -> None:
    connector = ScriptedConnector()
    bench = Bench(num_blocks=6, connector=connector)
    bench.add("first", [1] * 8, max_tokens=12)
    bench.add("second", [2] * 8, max_tokens=12)
    bench.run()
    assert set(connector.preempted) == {"second"}


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_gives_the_same_tokens_and_leaks_nothing(seed: int) -> None:
    random_source = random.Random(seed)
    bench = Bench(
        num_blocks=random_source.randint(14, 40),
        max_num_seqs=random_source.randint(1, 6),
        max_num_batched_tokens=random_source.randint(6, 24),
    )
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(40):
        name = str(number)
        prompts[name] = [random_source.randint(0, 2) for _ in range(random_source.randint(1, 30))]
        bench.add(name, prompts[name], max_tokens=12, priority=random_source.randint(0, 2))
        for _ in range(random_source.randint(0, 4)):
            bench.step()
        if random_source.random() < 0.1:
            bench.scheduler.abort(name)
            aborted.add(name)
    bench.run()
    for name in prompts.keys() - aborted:
        assert bench.tokens(name) == expected_answer(prompts[name], 12)
    bench.scheduler.check()
