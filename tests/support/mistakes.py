"""Mistakes that tests plant into the code, each of which a hunt must find."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kvferry.engine.scheduling.scheduler import Scheduler
from kvferry.engine.scheduling.sequence import Sequence as EngineSequence
from kvferry.engine.scheduling.sequence_blocks import SequenceBlocks
from kvferry.engine.scheduling.step import SampledToken
from kvferry.fleet.control import controller
from kvferry.fleet.control.election import Election
from kvferry.fleet.control.facts import Drain, Step, StopMember
from kvferry.fleet.control.loop import plan
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.instances.instance import Instance, InstanceState
from kvferry.store.tiered.breaker import Breaker
from kvferry.transport.lookup_buffer.entries import EntryTable
from support.planted import Plant


def renew_nothing(plant: Plant) -> None:
    """No lease is renewed."""
    plant(EntryTable, "renew", lambda self, *keys: None)


def take_any_generation(plant: Plant) -> None:
    """The fence holds for a key, whichever attempt was read."""
    take = EntryTable.take

    def take_any(self: EntryTable, key: str, generation: int, *args: Any) -> bool:
        entry = self._entries.get(key)
        return take(self, key, generation if entry is None else entry.generation, *args)

    plant(EntryTable, "take", take_any)


def stay_open(plant: Plant) -> None:
    """A breaker that has opened once never closes."""
    plant(Breaker, "is_open", property(lambda self: self.num_failures > 0))


def publish_early(plant: Plant) -> None:
    """A block is cached one token before it is full."""
    cache_full_blocks = SequenceBlocks.cache_full_blocks

    def publish_one_token_early(self: SequenceBlocks, sequence: EngineSequence) -> None:
        computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(computed + 1, len(sequence.tokens))
        cache_full_blocks(self, sequence)
        sequence.num_computed_tokens = computed

    plant(SequenceBlocks, "cache_full_blocks", publish_one_token_early)


def publish_answers_early(plant: Plant) -> None:
    """At the end of an answer, the block that its last token fills is cached, although that token has no KV."""
    append = Scheduler._append

    def append_and_publish(self: Scheduler, sequence: EngineSequence, sampled: SampledToken) -> None:
        sequence.tokens.append(sampled.token_id)
        computed, known = sequence.num_computed_tokens, len(sequence.tokens)
        if computed == known - 1 and sequence.num_blocks_for(known) == len(sequence.block_ids):
            sequence.num_computed_tokens = known
            self._blocks.cache_full_blocks(sequence)
            sequence.num_computed_tokens = computed
        sequence.tokens.pop()
        append(self, sequence, sampled)

    plant(Scheduler, "_append", append_and_publish)


def stop_at_once(plant: Plant) -> None:
    """A fleet stops what it should drain."""

    def without_drains(*args: Any) -> list[Step]:
        steps = plan(*args)
        return [StopMember(one.name, "drained") if isinstance(one, Drain) else one for one in steps]

    plant(controller, "plan", without_drains)


def act_for_ever(plant: Plant) -> None:
    """A controller acts on after another one may have taken its place."""
    plant(Election, "is_leader", True)


def surge_by_one_more(plant: Plant) -> None:
    """A roll starts one member more in advance than it may."""

    def with_more(fleet: DesiredFleet, *args: Any) -> list[Step]:
        roll = structs.replace(fleet.roll, surge=fleet.roll.surge + 1)
        return plan(structs.replace(fleet, roll=roll), *args)

    plant(controller, "plan", with_more)


def fail_when_measured(plant: Plant) -> None:
    """The router's rule for short prompts fails once it has measured enough hand-offs."""
    reason = Threshold.keeps_aggregated

    def fail(self: Threshold, *args: Any) -> str | None:
        if self.active:
            raise ZeroDivisionError("a mistake")
        return reason(self, *args)

    plant(Threshold, "keeps_aggregated", fail)


def stay_down(plant: Plant) -> None:
    """A router never uses an instance again that was down once."""
    mark_healthy = Instance.mark_healthy

    def is_well_once(self: Instance) -> None:
        if self.state is not InstanceState.DOWN:
            mark_healthy(self)

    plant(Instance, "mark_healthy", is_well_once)
