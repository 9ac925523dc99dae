"""Requests that share prefixes, many at once: what a prefix cache finds of one request while another is computed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

VOCABULARY = 4000


def num_answers(default: int) -> int:
    """How many a test asks for: KVFERRY_SHARED_ANSWERS, where somebody wants more than CI has time for."""
    return int(os.environ.get("KVFERRY_SHARED_ANSWERS", default))


def waves(count: int, longest: int, seed: int, *, lowest: int = 3) -> Iterator[list[list[int]]]:
    """Prompts of up to `longest` tokens, `count` in all, in waves of 16 to 24 that are asked at once.

    A wave has some stems, not seen before: most prompts are a stem and a few tokens more, some a turn of a chat (all
    that an earlier prompt of the wave had, and more), some a stem cut short, some the same as another.
    """
    source = random.Random(seed)
    while count > 0:
        wave = _wave(source, min(count, source.randint(16, 24)), longest, lowest)
        count -= len(wave)
        yield wave


def _wave(source: random.Random, size: int, longest: int, lowest: int) -> list[list[int]]:
    def tokens(count: int) -> list[int]:
        return [source.randrange(lowest, VOCABULARY) for _ in range(count)]

    stems = [tokens(source.randint(longest // 3, longest * 3 // 4)) for _ in range(source.randint(1, 3))]
    prompts: list[list[int]] = []
    for _ in range(size):
        base = source.choice(prompts if prompts and source.random() < 0.3 else stems)
        if source.random() < 0.15:
            prompts.append(base[: source.randint(1, len(base))])
        else:
            prompts.append((base + tokens(source.choice((0, 1, 5, 31, 32, 33, 70))))[:longest])
    return prompts
