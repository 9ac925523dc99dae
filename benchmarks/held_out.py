"""Traces on which no rule of scaling was tuned: written down, with their seeds, before any rule ran on them.

mmpp      a Markov-modulated Poisson process: the seed draws the rates of its states, how long it stays in each, and
          the lengths of prompts and answers
diurnal   a day in an hour: a slow ramp up and down, with flash crowds whose times, heights and lengths the seed draws
mix       three kinds of requests (documents, chats, long answers) in bunches, whose shares the seed changes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvferry.sim.traffic import Arrival

SEEDS = {"mmpp": 20261, "diurnal": 20262, "mix": 20263}
_LONGEST_PROMPT, _MAX_ANSWER = 16_000, 4_000


def held_out(name: str, for_s: float, seed: int) -> list[Arrival]:
    """One of them, with its seed of `SEEDS`; with another seed, one of its kind that is not held out."""
    return MAKERS[name](Random(seed), for_s)


def _mmpp(random: Random, for_s: float) -> list[Arrival]:
    rates = sorted(math.exp(random.uniform(math.log(0.3), math.log(10.0))) for _ in range(4))
    stays_s = [random.uniform(40.0, 300.0) / (1 + state_index) for state_index in range(4)]  # the busier, the shorter
    prompt, answer = random.uniform(6.5, 7.8), random.uniform(4.5, 5.8)
    now, arrivals, state, until = 0.0, list[Arrival](), 0, random.expovariate(1 / stays_s[0])
    while now < for_s:
        now += random.expovariate(rates[state])
        if now > until:
            now, state = until, random.choice([other for other in range(4) if other != state])
            until = now + random.expovariate(1 / stays_s[state])
            continue
        arrivals.append(_arrival(random, now, (prompt, 0.8), (answer, 0.7)))
    return _from_zero(arrivals)


def _diurnal(random: Random, for_s: float) -> list[Arrival]:
    crowds = [(random.uniform(0.1, 0.9) * for_s, random.uniform(2.0, 6.0), random.uniform(40.0, 150.0)) for _ in "123"]

    def rate(at_s: float) -> float:
        base = 0.5 + 3.0 * math.sin(math.pi * at_s / for_s) ** 2
        return base + sum(
            height * min(1.0, (at_s - begins) / 15.0) * math.exp(-(at_s - begins) / lasts_s)
            for begins, height, lasts_s in crowds
            if at_s > begins
        )

    now, arrivals, max_rate = 0.0, list[Arrival](), 3.5 + sum(height for _, height, _ in crowds)
    while (now := now + random.expovariate(max_rate)) < for_s:
        if random.random() < rate(now) / max_rate:
            arrivals.append(_arrival(random, now, (7.2, 1.0), (5.3, 0.6)))
    return _from_zero(arrivals)


def _mix(random: Random, for_s: float) -> list[Arrival]:
    kinds = (((9.0, 0.3), (4.5, 0.5)), ((6.0, 0.8), (5.5, 0.5)), ((6.5, 0.5), (7.3, 0.4)))
    now, arrivals, weights, until = 0.0, list[Arrival](), [1.0, 1.0, 1.0], 0.0
    while now < for_s:
        if now >= until:
            weights, until = [random.expovariate(1.0) for _ in kinds], now + random.uniform(120.0, 480.0)
        now += random.gammavariate(0.25, 1 / (0.25 * 2.5))  # 2.5 a second, in bunches: a coefficient of variation of 2
        prompt, answer = random.choices(kinds, weights)[0]
        arrivals.append(_arrival(random, now, prompt, answer))
    return _from_zero(arrivals)


def _arrival(random: Random, at_s: float, prompt: tuple[float, float], answer: tuple[float, float]) -> Arrival:
    """Log-normal lengths: (mean, deviation) of their logarithms."""
    tokens = min(_LONGEST_PROMPT, 16 + int(random.lognormvariate(*prompt)))
    return Arrival(at_s, tokens, min(_MAX_ANSWER, 1 + int(random.lognormvariate(*answer))))


def _from_zero(arrivals: list[Arrival]) -> list[Arrival]:
    return [replace(arrival, at_s=arrival.at_s - arrivals[0].at_s) for arrival in arrivals]


MAKERS: dict[str, Callable[[Random, float], list[Arrival]]] = {"mmpp": _mmpp, "diurnal": _diurnal, "mix": _mix}
