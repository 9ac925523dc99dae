"""Hand-offs between engines whose blocks differ, of prefixes at every split point, and back for the next turn."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.messages.hand_off import Consume, Produce, parse_hand_off
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.engine import Engine
from kvferry.testing.stepping import IdleWait, early_ticket
from support.engines import GREEDY, SEEDED, Answer, random_prompts, require_same, run_prompts
from support.pairs import Pair, pair_of

NUM_PROMPTS = 14
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
BLOCK_SIZES = [(8, 32), *(pytest.param(sizes, marks=pytest.mark.full) for sizes in [(16, 32), (32, 16)])]


@pytest.fixture(scope="module")
def model(model_maker: Any) -> Path:
    path: Path = model_maker("llama")
    return path


def pair(model: Path, block_sizes: tuple[int, int], decode_memory: str = "64MiB", **extra: Any) -> Any:
    prefill, decode = block_sizes
    return pair_of(
        model,
        "P2pConnector",
        extra=extra,
        prefill={"block_size": prefill, "max_num_batched_tokens": 40},
        decode={"block_size": decode, "kv_cache_memory": decode_memory},
        role="kv_both",
    )


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES, ids=str)
def test_other_block_sizes_change_nothing(block_sizes: tuple[int, int], form: str, model: Path) -> None:
    with pair(model, block_sizes, transport="tcp" if form == "concurrent" else "shm") as engines:
        prompts = random_prompts(NUM_PROMPTS, engines.decode.model.vocab_size, longest=110, block_size=8, seed=4)
        sampling = GREEDY if form == "sequential" else SEEDED
        require_same(run_prompts(engines.prefill, prompts, sampling), engines.run(prompts, sampling, form))
        engines.settle()
        statistics = engines.decode.statistics().external_kv
        assert statistics.num_load_failures == {}
        assert statistics.num_external_hits > 0.5 * sum(map(len, prompts))


def ticket_of(output: EngineOutput) -> Any:
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def run_one(engine: Engine, other: Engine, request: Request) -> Answer:
    """Serve one request, with the other engine stepping along."""
    answer, rest = Answer(), IdleWait(engine, other)
    engine.add(request)
    while answer.last is None or answer.last.finish_reason is None:
        other.step()
        for output in engine.step():
            answer.add(output)
        rest()
    return answer


def request(name: str, prompt: list[int], hand_off: Any, sampling: SamplingParams = SHORT) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, hand_off=hand_off)


@pytest.mark.parametrize(
    ("form", "block_sizes"),
    [
        ("sequential", (16, 16)),
        ("concurrent", (8, 32)),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in [
                ("sequential", (16, 32)),
                ("sequential", (32, 16)),
                ("sequential", (8, 32)),
                ("concurrent", (16, 16)),
            ]
        ),
    ],
    ids=str,
)
def test_a_prefix_may_end_anywhere(form: str, block_sizes: tuple[int, int], model: Path) -> None:
    """P has computed the first `split` tokens only, and D may have some of them already."""
    with pair(model, block_sizes) as engines:
        prefill, decode = engines.prefill, engines.decode
        edges = [1, *(edge + off for edge in (8, 16, 32, 64) for off in (-1, 0, 1)), 69]
        for split in edges:
            prompt = [(7 * split + 3 * position) % decode.model.vocab_size for position in range(70)]
            [alone] = run_prompts(prefill, [prompt], SHORT)
            cached = prompt[: split // 2]
            if cached:
                run_prompts(decode, [cached], SHORT)
            handed = request(f"p{split}", prompt[:split], Produce(f"t{split}"))
            if form == "sequential":
                ticket = parse_hand_off(ticket_of(run_one(prefill, decode, handed).last), "d")
            else:
                ticket = Consume(early_ticket(f"t{split}", prefill.addresses, prefill.scheduler_side))
                prefill.add(handed)
            before = decode.statistics().external_kv.num_external_hits
            found = run_one(decode, prefill, request(f"d{split}", prompt, ticket))
            assert found.tokens == alone.tokens, f"split at {split}"
            promised = decode.statistics().external_kv.num_external_hits - before
            whole = len(prompt) if form == "concurrent" else split
            assert promised == whole - len(cached) // block_sizes[1] * block_sizes[1]
        engines.settle()
        assert decode.statistics().external_kv.num_load_failures == {}


@pytest.mark.parametrize("block_sizes", [(16, 16), *BLOCK_SIZES], ids=str)
def test_the_next_turn_s_prefill_fetches_what_the_decode_kept(block_sizes: tuple[int, int], model: Path) -> None:
    with pair(model, block_sizes) as engines:
        prefill, decode = engines.prefill, engines.decode
        for number in range(4):
            first = [(11 * number + 5 * position) % decode.model.vocab_size for position in range(40 + 9 * number)]
            turn = turn_of(engines, f"{number}-1", first, Produce(f"t{number}-1"), keep=True)
            answered = [*first, *turn.tokens]
            followed = [*answered, *range(100, 117 + number)]
            params = ticket_of(turn.last)
            assert params["do_remote_decode"]
            assert params["remote_num_tokens"] == len(answered) - 1
            hand_off = parse_hand_off({**params, "transfer_id": f"t{number}-2"}, "x")
            assert isinstance(hand_off, Produce)
            prefill.pool.forget_all()  # this P knows nothing of the first turn
            before = prefill.statistics().external_kv.num_external_hits
            found = turn_of(engines, f"{number}-2", followed, hand_off, keep=False)
            assert prefill.statistics().external_kv.num_external_hits - before == len(answered) - 1
            prefill.pool.forget_all()
            [alone] = run_prompts(prefill, [followed], SHORT)
            assert found.tokens == alone.tokens
        engines.settle()
        assert prefill.statistics().external_kv.num_load_failures == {}


def turn_of(engines: Pair, name: str, prompt: list[int], hand_off: Any, *, keep: bool) -> Answer:
    """One turn: prefill, then decode; D keeps its blocks where asked."""
    prefill = run_one(engines.prefill, engines.decode, request(f"p{name}", prompt, hand_off))
    consume = parse_hand_off({**ticket_of(prefill.last), "keep_for_next_turn": keep}, name)
    return run_one(engines.decode, engines.prefill, request(f"d{name}", prompt, consume))


def test_kept_answers_of_more_conversations_than_fit_keep_no_request_waiting(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next turns of these may never come, and `kv_buffer_size` is more than all of this KV cache."""
    with pair(model, (16, 16), decode_memory="256KiB") as engines:
        decode = engines.decode
        num_blocks = decode.pool.statistics().num_blocks
        turns = [
            turn_of(engines, str(number), [number, *range(56)], Produce(f"t{number}"), keep=True)
            for number in range(num_blocks // 4 + 3)  # four blocks each
        ]
        assert decode.statistics().external_kv.num_held > 1
        whole = list(range(16 * (num_blocks - 1)))[::-1]
        found = run_one(decode, engines.prefill, request("whole", [token % 97 for token in whole], None))
        assert len(found.tokens) == SHORT.max_tokens
        caplog.clear()
        hand_off = parse_hand_off({**ticket_of(turns[0].last), "transfer_id": "next"}, "x")
        followed = [0, *range(56), *turns[0].tokens, 1, 2, 3]
        engines.prefill.pool.forget_all()
        found = turn_of(engines, "next", followed, hand_off, keep=False)
        assert engines.prefill.statistics().external_kv.num_load_failures == {"LeaseEnded": 1}
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        engines.prefill.pool.forget_all()
        [alone] = run_prompts(engines.prefill, [followed], SHORT)
        assert found.tokens == alone.tokens


def test_a_next_turn_that_tells_it_differently_fetches_what_is_common(model: Path) -> None:
    """A chat template may write the first answer otherwise than it was sampled."""
    with pair(model, (16, 16)) as engines:
        first = list(range(50))
        turn = turn_of(engines, "1", first, Produce("t1"), keep=True)
        followed = [*first, *(token + 1 for token in turn.tokens), *range(20)]
        hand_off = parse_hand_off({**ticket_of(turn.last), "transfer_id": "t2"}, "x")
        engines.prefill.pool.forget_all()
        before = engines.prefill.statistics().external_kv.num_external_hits
        found = turn_of(engines, "2", followed, hand_off, keep=False)
        assert engines.prefill.statistics().external_kv.num_external_hits - before == len(first)
        engines.prefill.pool.forget_all()
        [alone] = run_prompts(engines.prefill, [followed], SHORT)
        assert found.tokens == alone.tokens
        engines.settle()


def test_checksums_change_nothing(model: Path) -> None:
    with pair(model, (16, 32), checksum=True) as engines:
        prompts = random_prompts(NUM_PROMPTS, engines.decode.model.vocab_size, longest=110, block_size=8, seed=4)
        require_same(run_prompts(engines.prefill, prompts, GREEDY), engines.run(prompts, GREEDY, "concurrent"))
        engines.settle()
        assert engines.decode.statistics().external_kv.num_load_failures == {}
