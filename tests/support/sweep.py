"""Tries a configuration: is what the engine answers what the model itself generates, or is it refused?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from kvferry.core.errors import ConfigError, UnsupportedModel
from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.model.loader import read_settings
from kvferry.engine.model.rank_placement import RankPlacement
from support.engines import random_prompts, run_prompts
from support.families import TRAINED_CONTEXT, CannotBuildSmall, Case, make_config, make_model

NUM_PROMPTS, LONGEST, BLOCK_SIZE = 6, 60, 4
SAMPLING = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `reason`: of a refusal, and of what transformers itself does not do."""

    kind: Literal["exact", "wrong", "refused", "not tried"]
    reason: str = ""


def try_case(case: Case, folder: Path) -> Outcome:
    """Serve prompts together, in chunks, twice (the second time from the prefix cache), and compare."""
    try:
        model = make_model(case, folder)
    except CannotBuildSmall as error:
        return _by_configuration(case, folder, str(error))
    settings = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, kv_cache_memory="16MiB",
        max_num_seqs=8, max_num_batched_tokens=24,
    )  # fmt: skip
    try:
        engine = Engine(settings)
    except (UnsupportedModel, ConfigError) as error:
        return Outcome("refused", _reason(error, case, folder))
    try:
        prompts = _prompts(engine.model.vocab_size)
        answers = [[answer.tokens for answer in run_prompts(engine, prompts, SAMPLING)] for _ in range(2)]
        engine.check()
    finally:
        engine.close()
    try:
        expected = _generate(folder, model, prompts, use_cache=not case.by_forward)
    except Exception as error:  # noqa: BLE001 (transformers' own code, of any family)
        return Outcome("not tried", f"generate() fails: {type(error).__name__}")
    differing = [number for number, tokens in enumerate(expected) if any(found[number] != tokens for found in answers)]
    return Outcome("wrong", f"prompts {differing} of {len(prompts)} differ") if differing else Outcome("exact")


def _by_configuration(case: Case, folder: Path, reason: str) -> Outcome:
    """A model that cannot be built small may still be refused by its configuration."""
    try:
        config = make_config(case)
        (folder / "config.json").write_text(json.dumps(config.to_diff_dict() | {"model_type": case.family}))
    except (CannotBuildSmall, TypeError):
        return Outcome("not tried", reason)
    try:
        read_settings(EngineConfig(model=str(folder)), RankPlacement())
    except (UnsupportedModel, ConfigError) as error:
        return Outcome("refused", _reason(error, case, folder))
    return Outcome("not tried", reason)


def _reason(error: Exception, case: Case, folder: Path) -> str:
    """The message, without what the table says anyway; it must be one line."""
    text = str(error)
    assert "\n" not in text, "a refusal is one line"
    return text.replace(str(folder), case.family)


def _prompts(vocab: int) -> list[list[int]]:
    """Some share a prefix, some end at a block; one ends just within the trained context, one just beyond."""
    prompts = random_prompts(NUM_PROMPTS, vocab, longest=LONGEST, block_size=BLOCK_SIZE, seed=1)
    generator = torch.Generator().manual_seed(5)
    trunk = torch.randint(0, vocab, (TRAINED_CONTEXT + 1,), generator=generator).tolist()
    return [*prompts, trunk[:-3], trunk]


def _generate(folder: Path, model: Any, prompts: Sequence[Sequence[int]], *, use_cache: bool) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLING.max_tokens, do_sample=False,
            pad_token_id=0, use_cache=use_cache,
        )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    return answers
