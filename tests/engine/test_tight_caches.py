"""Many concurrent hand-offs through KV caches of two or three requests: no two instances wait for each other.

Each decode instance is asked in another order than the prefill instances. What it reserved for prefills that have not
begun would then keep out hand-offs that a full prefill instance has finished, and cannot give up.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.messages.hand_off import Consume, Produce
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.testing.stepping import IdleWait, early_ticket
from support.engines import Answer, random_prompts, run_prompts

NUM_PROMPTS, LONGEST, NUM_BLOCKS = 60, 90, 24
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
TIMEOUT_S = 20.0
"""After it, a load fails, and the test with it; all hand-offs together take a tenth of it where nobody waits."""
SETTINGS = {"dtype": "float32", "device": "cpu", "block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def expected(model_maker: Any) -> tuple[Path, list[list[int]], list[list[int]], int]:
    """The model, prompts, what one engine answers, and the bytes of a block."""
    model = model_maker("llama")
    with closing(Engine(EngineConfig(model=str(model), **SETTINGS, max_num_seqs=16, kv_cache_memory="64MiB"))) as alone:
        prompts = random_prompts(NUM_PROMPTS, alone.model.vocab_size, longest=LONGEST, block_size=8, seed=3)
        tokens = [answer.tokens for answer in run_prompts(alone, prompts, SAMPLING)]
        return model, prompts, tokens, alone.layout.block_bytes


@pytest.mark.parametrize("max_num_seqs", [16, 2], ids=["blocks", "places"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2)], ids=["1P1D", "2P2D"])
def test_all_hand_offs_complete(num_prefill: int, num_decode: int, max_num_seqs: int, expected: Any) -> None:
    model, prompts, tokens, block_bytes = expected
    num_blocks = NUM_BLOCKS if max_num_seqs > 2 else 4 * NUM_BLOCKS

    def engine(role: str, num_blocks: int) -> Engine:
        transfer = KVTransferConfig(
            kv_connector="P2pConnector", kv_role=role, kv_connector_extra_config={"timeout_s": TIMEOUT_S}
        )
        memory = str(num_blocks * block_bytes)
        config = EngineConfig(model=str(model), **SETTINGS, kv_cache_memory=memory, max_num_seqs=max_num_seqs)
        return stack.enter_context(closing(Engine(config, transfer, auth_token="test")))

    with ExitStack() as stack:
        prefills = [engine("kv_producer", NUM_BLOCKS) for _ in range(num_prefill)]
        decodes = [engine("kv_consumer", num_blocks) for _ in range(num_decode)]
        rng, answers = random.Random(5), [Answer() for _ in prompts]
        order = list(range(len(prompts)))
        for number in order:
            prefills[number % num_prefill].add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=prompts[number],
                    sampling=SAMPLING,
                    hand_off=Produce(f"t{number}"),
                )
            )
        rng.shuffle(order)
        for number in order:
            prefill = prefills[number % num_prefill]
            ticket = early_ticket(f"t{number}", prefill.addresses, prefill.scheduler_side)
            decode = rng.choice(decodes)
            decode.add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=prompts[number],
                    sampling=SAMPLING,
                    hand_off=Consume(ticket),
                )
            )

        deadline, rest = time.monotonic() + 3 * TIMEOUT_S, IdleWait(*prefills, *decodes)
        while any(one.has_work for one in (*prefills, *decodes)):
            assert time.monotonic() < deadline, "the hand-offs did not end in time"
            for prefill in prefills:
                prefill.step()
            for decode in decodes:
                for output in decode.step():
                    answers[int(output.request_id)].add(output)
            rest()

        assert [answer.tokens for answer in answers] == tokens
        for decode in decodes:
            assert decode.statistics().external_kv.num_load_failures == {}
        for one in (*prefills, *decodes):
            one.check()
            one.pool.check()
