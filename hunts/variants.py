"""Kinds of scenarios that the usual ones do not reach: each seed is of one of these kinds, or of the usual one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal

from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.kv import expected_tokens
from kvferry.sim.network import NetworkSpec
from kvferry.sim.times import StepTimes
from kvferry.sim.world import DirectHandOff, RequestSpec, WorldSpec

Variant = Literal["usual", "slow", "many", "direct"]
"""`slow`: nothing breaks, and a hand-off takes longer than a lease; `many`: enough hand-offs for the router's estimates
to be used; `direct`: clients hand off themselves, and use the ids of their hand-offs again."""
_NUM_SLOW, _SLOW_EVERY_S = 4, 3.0
_NUM_MANY, _MANY_EVERY_S = 64, 0.02
_NUM_DIRECT, _DIRECT_EVERY_S = 12, 0.15
_TURN_SHARE = 0.3
"""Share of the requests whose prompt is an earlier one with its answer, and share of those that end with a full
block."""


def draw_variant(random: Random, *, has_store: bool) -> Variant:
    """The kind of a seed's scenario."""
    chance = random.random()
    if chance < 0.06:
        return "many"
    if has_store or chance > 0.24:
        return "usual"
    return "slow" if chance < 0.15 else "direct"


def with_turns(random: Random, requests: Sequence[RequestSpec], instance: SimInstanceSpec) -> list[RequestSpec]:
    """The requests, some of which are the next turns of earlier ones: their prompts contain the earlier answers."""
    turns: list[RequestSpec] = []
    for request in requests:
        if turns and random.random() < _TURN_SHARE:
            earlier = random.choice(turns)
            answer = expected_tokens(
                earlier.prompt, earlier.seed, earlier.max_tokens, instance.vocab_size, instance.num_layers
            )
            prompt = [*earlier.prompt, *answer, *request.prompt[:20]]
            if len(prompt) <= longest_prompt(instance, request.max_tokens):
                request = replace(request, prompt=prompt)
        if random.random() < _TURN_SHARE:
            max_tokens = request.max_tokens + -(len(request.prompt) + request.max_tokens) % instance.block_size
            if len(request.prompt) <= longest_prompt(instance, max_tokens):
                request = replace(request, max_tokens=max_tokens)
        turns.append(request)
    return turns


def longest_prompt(instance: SimInstanceSpec, max_tokens: int) -> int:
    """The most tokens of a prompt that an instance accepts for an answer of this length."""
    return min(instance.max_model_len, instance.num_blocks * instance.block_size) - 1 - max_tokens


def slow(random: Random, world: WorldSpec) -> tuple[WorldSpec, list[RequestSpec]]:
    """Hand-offs that take more than a lease each, and nothing that could end one."""
    options = {**world.instance.options, "timeout_s": 60.0, "unsealed_s": 60.0}
    instance = replace(world.instance, options=options)
    num_tokens = 200
    bandwidth = num_tokens * instance.num_layers * instance.layer_bytes / random.uniform(1.5, 2.5)
    router = {name: 60.0 if name.endswith("_s") else value for name, value in world.router.items()}
    world = replace(
        world,
        instance=instance,
        network=NetworkSpec(bandwidth=bandwidth),
        router={**router, "disaggregate_from": "0"},
    )
    requests = [
        _request(random, instance, number * _SLOW_EVERY_S, num_tokens - random.randrange(20), random.choice((1, 10)))
        for number in range(_NUM_SLOW)
    ]
    return world, requests


def many(random: Random, world: WorldSpec) -> tuple[WorldSpec, list[RequestSpec]]:
    """Short requests of one router, which measures them and then decides itself which to hand off."""
    world = replace(world, num_routers=1, router={**world.router, "disaggregate_from": "auto"})
    requests = [
        _request(random, world.instance, number * _MANY_EVERY_S, random.choice((5, 20, 80)), random.choice((1, 2, 4)))
        for number in range(_NUM_MANY)
    ]
    return world, requests


def direct(random: Random, world: WorldSpec) -> tuple[WorldSpec, list[RequestSpec]]:
    """Requests without a router, whose keys begin again while D reads. Threads of an instance wake each other late, so
    that messages of the one attempt meet the other."""
    instance = replace(
        world.instance,
        num_blocks=48,
        max_num_batched_tokens=1024,
        times=StepTimes(base_s=0.001),
        wake_s=0.02,
        kv_load_failure_policy="recompute",
    )
    num_tokens = min(200, longest_prompt(instance, 10))
    bandwidth = num_tokens * instance.num_layers * instance.layer_bytes / 0.08
    world = replace(world, instance=instance, network=NetworkSpec(bandwidth=bandwidth))
    requests = []
    for number in range(_NUM_DIRECT):
        again = DirectHandOff(random.random(), random.random(), random.uniform(0.02, 0.12))
        request = _request(random, instance, number * _DIRECT_EVERY_S, num_tokens - random.randrange(20), 4)
        requests.append(replace(request, direct=again))
    return world, requests


def _request(random: Random, instance: SimInstanceSpec, at_s: float, num_tokens: int, max_tokens: int) -> RequestSpec:
    prompt = [random.randrange(instance.vocab_size) for _ in range(num_tokens)]
    return RequestSpec(at_s, prompt, max_tokens, random.getrandbits(32))
