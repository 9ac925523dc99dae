"""Random traffic between a prefill and a decode instance, with everything that can go wrong on the way.

Whatever happens, each request ends, with the right KV in its blocks, and nothing is left behind.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout, sharded
from pipe_support import KINDS

from kvferry.core.errors import LeaseEnded
from kvferry.core.messages.hand_off import Consume, HandOff, Produce, parse_hand_off
from kvferry.testing import stepping
from support.eager_p2p import EagerWorkerSide
from support.libraries import require_library

CONNECTORS = {
    "p2p-shm": ("P2pConnector", {"transport": "shm", "lease_s": 0.1, "timeout_s": 1.0}),
    "p2p-tcp": ("P2pConnector", {"transport": "tcp", "lease_s": 0.1, "timeout_s": 1.0}),
    "p2p-gloo": ("P2pConnector", {"transport": "gloo", "lease_s": 0.1, "timeout_s": 1.0}),
    "p2p-pipe": ("P2pConnector", {"transport": KINDS["example"], "lease_s": 0.1, "timeout_s": 1.0}),
    "p2p-small-buffer": ("P2pConnector", {"lease_s": 0.1, "timeout_s": 1.0, "buffer_size": 20_000.0}),
    "p2p-checksum": ("P2pConnector", {"lease_s": 0.1, "timeout_s": 1.0, "checksum": True}),
    "storage": ("SharedStorageConnector", {"timeout_s": 1.0}),
    "storage-layerwise": ("SharedStorageConnector", {"timeout_s": 1.0, "load": "layerwise"}),
    "storage-bounded": ("SharedStorageConnector", {"timeout_s": 1.0, "max_bytes": 20_000}),
}
# Other media under the same connector: one seed each, since their libraries take long to start and end.
MEDIA = {
    "valkey": ("KVStoreConnector", {"timeout_s": 1.0}),
    "valkey-bounded": ("KVStoreConnector", {"timeout_s": 1.0}),
    "nixl": ("NixlConnector", {"lease_s": 0.1, "timeout_s": 1.0}),
    "mooncake": ("MooncakeConnector", {"lease_s": 0.1, "timeout_s": 1.0}),
}
SHAPES = {
    "smaller blocks": (make_layout(2, 8), make_layout(2, 2)),
    "larger blocks": (make_layout(2, 2), make_layout(2, 6)),
    "two ranks to one": (sharded(make_layout(2), 2), make_layout(2)),
    "one rank to two": (make_layout(2), sharded(make_layout(2), 2)),
    "four ranks to two": (sharded(make_layout(2, 8), 4), sharded(make_layout(2), 2)),
    "whole heads on two ranks": (sharded(make_layout(2), 2, whole=True), make_layout(2)),
}
"""Layouts of P and of D that differ."""
NUM_ACTIONS = 1500
NUMBERED_SHAPES = [
    pytest.param(seed, name, marks=[pytest.mark.full] if name == "four ranks to two" else [])
    for seed, name in enumerate(SHAPES)
]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))]
MAX_OPEN = 6
NUM_LAST = 20


class Traffic:
    """Two instances, the requests on their way, and rng."""

    def __init__(self, producer: FakeEngine, consumer: FakeEngine, seed: int) -> None:
        self.producer, self.consumer = producer, consumer
        self.rng = random.Random(seed)
        self.prompts: dict[str, list[int]] = {}
        self.prefills: dict[str, FakeRequest] = {}
        self.decodes: dict[str, FakeRequest] = {}

    @property
    def num_sharing(self) -> int:
        """Prefills that have blocks of another one's."""
        return sum(prefill.shares is not None for prefill in self.prefills.values())

    def act(self) -> None:
        """One thing that may happen."""
        actions: list[Callable[[], None]] = [self.producer.step, self.consumer.step] * 24
        actions += [self.arrive] * 10 + [self.hand_over] * 10
        actions += [self.abort_prefill, self.abort_decode, self.preempt, self.release]
        self.rng.choice(actions)()

    def arrive(self) -> None:
        if len(self.producer.requests) >= MAX_OPEN or len(self.consumer.requests) >= MAX_OPEN:
            return
        key = f"t{len(self.prompts)}"
        shared, own = self.rng.randrange(12), self.rng.randrange(1, 15)
        self.prompts[key] = [*range(shared), *(self.rng.randrange(1000) for _ in range(own))]
        self.prefills[key] = self.producer.add(FakeRequest(f"{key}-p", self.prompts[key], Produce(key)))
        if self.rng.random() < 0.5:
            self.decode(key, self.early_ticket(key))

    def early_ticket(self, key: str) -> dict[str, object]:
        return stepping.early_ticket(key, self.producer.addresses, self.producer.scheduler).to_params()

    def hand_over(self) -> None:
        """A router sends a finished prefill's ticket to the decode instance, perhaps late."""
        for key, prefill in self.prefills.items():
            if prefill.ticket is not None and key not in self.decodes and len(self.consumer.requests) < MAX_OPEN:
                self.decode(key, prefill.ticket)
                return

    def decode(self, key: str, ticket: dict[str, object]) -> None:
        hand_off = parse_hand_off(ticket, key)
        assert isinstance(hand_off, Consume)
        request = FakeRequest(f"{key}-d", self.prompts[key], hand_off)
        if hand_off.ticket.is_of(self.prompts[key]):
            request.prefill_result = hand_off.ticket.prefill_result
        self.decodes[key] = self.consumer.add(request)

    def abort_prefill(self) -> None:
        self.pick(self.producer, ("waiting", "running"), self.producer.abort)

    def abort_decode(self) -> None:
        self.pick(self.consumer, ("waiting", "loading", "running"), self.consumer.abort)

    def preempt(self) -> None:
        self.pick(self.producer, ("running",), self.producer.preempt)

    def release(self) -> None:
        if self.prompts:
            self.producer.scheduler.release(self.rng.choice(list(self.prompts)))

    def pick(self, engine: FakeEngine, states: tuple[str, ...], do: Callable[[FakeRequest], None]) -> None:
        found = [request for request in engine.requests.values() if request.state in states]
        if found:
            do(self.rng.choice(found))

    def settle(self) -> None:
        """Both go on until every request has ended."""
        while self.producer.requests or self.consumer.requests:
            for engine in (self.producer, self.consumer):
                engine.step()

    def require_a_hand_off(self) -> None:
        """After all that, one that nothing happens to works: not even the end of its short lease, which a machine that
        stands still would bring."""
        for number in range(NUM_LAST):
            last = self.one_more(f"last-{number}")
            if not isinstance(last.error, LeaseEnded):
                break
        assert last.error is None
        assert last.num_computed_here < len(last.prompt_token_ids)

    def one_more(self, name: str) -> FakeRequest:
        """A hand-off from its beginning to its end; the request of it at D."""
        self.prompts[name] = [5000, 5001, 5002, 5003, 5004]
        prefill = self.producer.run(FakeRequest(f"{name}-p", self.prompts[name], Produce(name)))
        assert prefill.ticket is not None
        self.decode(name, prefill.ticket)
        self.consumer.run_until(lambda: self.decodes[name].state == "done")
        return self.decodes[name]


class Conversations(Traffic):
    """Prompts that continue what a decode instance kept, and prefills of a part of the prompt only."""

    def act(self) -> None:
        faults = [self.abort_prefill, self.abort_decode, self.preempt, self.release]
        self.rng.choice([*[self.arrive, self.hand_over] * 8, *faults])()
        for engine in (self.producer, self.consumer):
            engine.step()
            engine.rest()

    def arrive(self) -> None:
        if len(self.producer.requests) >= MAX_OPEN or len(self.consumer.requests) >= MAX_OPEN:
            return
        key = f"t{len(self.prompts)}"
        kept = [name for name, decode in self.decodes.items() if decode.ticket is not None]
        hand_off: HandOff = Produce(key)
        before: list[int] = []
        if kept and self.rng.random() < 0.8:
            earlier = kept[-1]
            hand_off = parse_hand_off({**(self.decodes[earlier].ticket or {}), "transfer_id": key}, key)
            before = self.prompts[earlier][: self.rng.choice([None, None, self.rng.randrange(20)])]
        self.prompts[key] = [*before[:40], *(self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 15)))]
        end = self.rng.choice([len(self.prompts[key]), self.rng.randrange(1, len(self.prompts[key]) + 1)])
        self.prefills[key] = self.producer.add(FakeRequest(f"{key}-p", self.prompts[key][:end], hand_off))
        if self.rng.random() < 0.5:
            self.decode(key, self.early_ticket(key))

    def decode(self, key: str, ticket: dict[str, object]) -> None:
        super().decode(key, {**ticket, "keep_for_next_turn": self.rng.random() < 0.7})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CONNECTORS)
def test_whatever_happens(make_engine: Callable[..., FakeEngine], tmp_path: Path, name: str, seed: int) -> None:
    connector, options = CONNECTORS[name]
    suffer(make_engine, tmp_path, connector, options, seed)


@pytest.mark.parametrize("name", MEDIA)
def test_whatever_happens_over_other_media(
    make_engine: Callable[..., FakeEngine], tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    require_library(name)
    connector, options = MEDIA[name]
    if name.startswith("valkey"):
        bound = "?max_bytes=20000" if name == "valkey-bounded" else ""
        options = {**options, "store": request.getfixturevalue("valkey_url") + bound}
    suffer(make_engine, tmp_path, connector, options, seed=0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["p2p-shm", "p2p-tcp", "storage-layerwise"])
def test_whatever_happens_to_shared_prefixes(
    make_engine: Callable[..., FakeEngine], tmp_path: Path, name: str, seed: int
) -> None:
    """Blocks that another request computes in the same step."""
    connector, options = CONNECTORS[name]
    options = {**options, "shares_prefixes": True}
    if connector == "P2pConnector":
        options["build_worker"] = EagerWorkerSide
    suffer(make_engine, tmp_path, connector, options, seed, num_sharing=11)


def suffer(
    make_engine: Callable[..., FakeEngine],
    folder: Path,
    connector: str,
    options: dict[str, object],
    seed: int,
    num_sharing: int = 0,
) -> Traffic:
    """Random traffic, until so many shared a prefix, and then one hand-off that nothing happens to."""
    if connector == "SharedStorageConnector":
        options = {**options, "shared_storage_path": str(folder)}
    traffic = Traffic(
        make_engine(connector, "kv_producer", num_blocks=96, **options),
        make_engine(connector, "kv_consumer", num_blocks=96, **options),
        seed,
    )
    run(traffic, NUM_ACTIONS, num_sharing)
    return traffic


@pytest.mark.parametrize(("seed", "name"), NUMBERED_SHAPES)
def test_whatever_happens_between_shapes(make_engine: Callable[..., FakeEngine], name: str, seed: int) -> None:
    options = {"lease_s": 0.1, "timeout_s": 1.0, "transport": ["shm", "tcp"][seed % 2]}
    theirs, ours = SHAPES[name]
    producer = make_engine("P2pConnector", "kv_producer", layout=theirs, num_blocks=96, **options)
    consumer = make_engine("P2pConnector", "kv_consumer", layout=ours, num_blocks=160, **options)
    run(Traffic(producer, consumer, seed), NUM_ACTIONS)


@pytest.mark.parametrize(("seed", "name"), NUMBERED_SHAPES)
def test_whatever_happens_in_conversations(make_engine: Callable[..., FakeEngine], name: str, seed: int) -> None:
    options = {"lease_s": 0.1, "timeout_s": 1.0, "decoder_kv_blocks_ttl": 0.3, "checksum": seed % 2 == 0}
    theirs, ours = SHAPES[name]
    producer = make_engine("P2pConnector", layout=theirs, num_blocks=160, **options)
    consumer = make_engine("P2pConnector", layout=ours, num_blocks=400, **options)
    traffic = Conversations(producer, consumer, seed)
    run(traffic, NUM_ACTIONS // 10)
    prefills = traffic.prefills.values()
    fetched = [one for one in prefills if one.error is None and one.num_computed_here < one.num_computed]
    assert fetched, "no next turn fetched what was kept"


def run(traffic: Traffic, num_actions: int, num_sharing: int = 0) -> None:
    """How many requests meet within the actions depends on the machine's speed: leases and reads take real time."""
    for number in range(50 * num_actions):
        if number >= num_actions and traffic.num_sharing >= num_sharing:
            break
        traffic.act()
    assert traffic.num_sharing >= num_sharing
    traffic.settle()
    ended = {request.state for request in [*traffic.prefills.values(), *traffic.decodes.values()]}
    assert ended <= {"done", "aborted"}
    traffic.require_a_hand_off()
