"""The contract of connectors, in real engines with a small model. In a package that provides one:

    from kvferry.testing.connector import CacheContract, HandOffContract

    class TestMyConnector(HandOffContract):
        connector = "my_package.my_module:MyConnector"

        def extra(self, folder):
            return {"path": str(folder)}

`HandOffContract` is for connectors that hand off between two engines, `CacheContract` for connectors that keep blocks
for reuse; a connector that does both passes both. All engines are in the test's process and compute on the CPU. Needs
pytest.

An engine computes what it cannot load, so that equal answers do not show that anything was loaded. Every request to D
is therefore made within one of `EnginePair.loads`, `may_load`, `fails_to_load` and `loads_or_fails`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvferry.connectors.api import HandsOff
from kvferry.connectors.caching import KeepsBlocks, lossy_codecs
from kvferry.connectors.registry import find_connector
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, LeakError
from kvferry.core.messages.hand_off import Consume, HandOff, Produce, parse_hand_off
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.models.random_model import make_random_model
from kvferry.testing.stepping import IdleWait, early_ticket

BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PROMPT = [5 + 3 * number for number in range(30)]
OTHER_PROMPT = [7 + 5 * number for number in range(30)]
LENGTHS = (1, BLOCK_SIZE - 1, 7 * BLOCK_SIZE - 1, 7 * BLOCK_SIZE, 7 * BLOCK_SIZE + 1)
"""Lengths of prompts: around multiples of the block size, where a prompt fills its last block or just begins it."""
P_AND_D = ("kv_producer", "kv_consumer")


@dataclass(frozen=True)
class DecodeLoads:
    """D's loads through the connector: number of tokens whose load has begun, and failures by error."""

    num_tokens: int
    failures: dict[str, int]

    def since(self, before: DecodeLoads) -> DecodeLoads:
        """The difference."""
        grown = {error: number - before.failures.get(error, 0) for error, number in self.failures.items()}
        failures = {error: number for error, number in grown.items() if number}
        return DecodeLoads(self.num_tokens - before.num_tokens, failures)


class EnginePair:
    """A P and a D joined by a connector, stepped in turn, and `alone`, an engine without a connector for comparison,
    which its creator closes. With one role, P and D are one engine."""

    deadline_s = 60.0

    def __init__(
        self, model: Path, connector: str, extra: dict[str, Any], alone: Engine, roles: Sequence[str] = P_AND_D
    ) -> None:
        self._joined: list[Engine] = []
        try:
            for role in roles:
                config = KVTransferConfig(
                    kv_connector=connector,
                    kv_role=role,  # type: ignore[arg-type]
                    engine_id=role,
                    kv_connector_extra_config=extra,
                )
                self._joined.append(Engine(_engine_config(model), config, auth_token="contract"))
        except BaseException:
            self.close()
            raise
        self.prefill, self.decode = self._joined[0], self._joined[-1]
        self.alone, self._engines = alone, [*self._joined, alone]
        self._rest = IdleWait(*self._engines)
        self.outputs: dict[str, list[EngineOutput]] = {}
        self._figures: dict[tuple[int, str], float] = {}
        self._is_watched = False

    @contextmanager
    def loads(self, *prompts: Sequence[int]) -> Iterator[None]:
        """Fail unless D loads at least the full blocks of all these prompts in the body, and no load fails."""
        with self._watched() as loads:
            yield
        [loaded] = loads
        expected = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts)
        limit = sum(map(len, prompts))
        assert expected <= loaded.num_tokens <= limit, f"{loaded}, instead of {expected} to {limit} tokens"
        assert not loaded.failures, loaded

    @contextmanager
    def may_load(self) -> Iterator[None]:
        """Fail if a load fails in the body. For requests whose KV may or may not have arrived."""
        with self._watched() as loads:
            yield
        [loaded] = loads
        assert not loaded.failures, loaded

    @contextmanager
    def fails_to_load(self) -> Iterator[None]:
        """Fail unless D counts exactly one failed load, or refused hand-off, in the body."""
        with self._watched() as loads:
            yield
        [loaded] = loads
        assert sum(loaded.failures.values()) == 1, loaded

    @contextmanager
    def loads_or_fails(self) -> Iterator[None]:
        """Fail if D neither loads anything in the body nor counts a failed load."""
        with self._watched() as loads:
            yield
        [loaded] = loads
        assert loaded.num_tokens or loaded.failures, "the prompt was computed, and nothing says why"

    @contextmanager
    def _watched(self) -> Iterator[list[DecodeLoads]]:
        """Gives a list to which the loads of the body are added at its end."""
        before, loads, self._is_watched = self._loads(), list[DecodeLoads](), True
        try:
            yield loads
        finally:
            self._is_watched = False
        loads.append(self._loads().since(before))

    def _loads(self) -> DecodeLoads:
        external = self.decode.statistics().external_kv
        return DecodeLoads(external.num_external_hits, external.num_load_failures)

    def add(self, engine: Engine, name: str, prompt: list[int], hand_off: HandOff = None) -> None:
        """Add a request; a prefill for another instance generates one token."""
        assert self._is_watched or engine is not self.decode, (
            "say what D loads, for instance `with pair.loads(prompt):`"
        )
        sampling = ONE_TOKEN if isinstance(hand_off, Produce) else GREEDY
        self.outputs[name] = []
        engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, hand_off=hand_off))

    def finish(self, name: str) -> EngineOutput:
        """Step until this request has finished; returns its last output."""
        self.step_until(lambda: any(output.finish_reason for output in self.outputs[name]), f"request {name} to end")
        return self.outputs[name][-1]

    def tokens(self, name: str) -> list[int]:
        """The answer so far."""
        return [token for output in self.outputs[name] for token in output.token_ids]

    def prefilled(self, transfer_id: str, prompt: list[int]) -> dict[str, Any]:
        """Have P prefill a prompt for D; returns the ticket."""
        self.add(self.prefill, f"p-{transfer_id}", prompt, Produce(transfer_id))
        ticket = self.finish(f"p-{transfer_id}").kv_transfer_params
        assert ticket is not None, "the answer of a prefill for another instance has a ticket"
        return ticket

    def decoded(self, name: str, prompt: list[int], ticket: dict[str, Any] | None) -> EngineOutput:
        """Have D answer with a ticket; returns the last output."""
        self.add(self.decode, name, prompt, parse_hand_off(ticket, name))
        return self.finish(name)

    def consume_early(self, name: str, transfer_id: str, prompt: list[int]) -> None:
        """Add a request to D for a hand-off that P has not begun; no engine is stepped yet."""
        ticket = early_ticket(transfer_id, self.prefill.addresses, self.prefill.scheduler_side)
        self.add(self.decode, name, prompt, Consume(ticket))

    def expected(self, prompt: list[int]) -> list[int]:
        """The answer of an engine without a connector."""
        name = f"alone-{len(self.outputs)}"
        self.add(self.alone, name, prompt)
        self.finish(name)
        return self.tokens(name)

    def step(self, engine: Engine) -> None:
        """Do one step of one engine."""
        for output in engine.step():
            self.outputs[output.request_id].append(output)

    def step_until(self, condition: Callable[[], bool], event: str) -> None:
        """Step all engines until the condition holds. Fails after a deadline that no healthy connector comes near."""
        deadline = SYSTEM_CLOCK.monotonic() + self.deadline_s
        while not condition():
            assert SYSTEM_CLOCK.monotonic() < deadline, f"waited {self.deadline_s:g} s for {event}"
            for engine in self._engines:
                self.step(engine)
            self._require_that_counters_grow()
            self._rest()

    def settle(self) -> None:
        """Step until nothing is held; fails with the name of the leaking resource."""
        leak = ""

        def is_clean() -> bool:
            nonlocal leak
            try:
                for engine in self._engines:
                    if not engine.scheduler.is_empty:
                        raise LeakError("a request, or blocks held for a peer")
                    engine.check()
            except LeakError as error:
                leak = str(error)
                return False
            return True

        try:
            self.step_until(is_clean, "the engines to give everything back")
        except AssertionError as error:
            raise AssertionError(f"{error}: {leak}") from None

    def close(self) -> None:
        """End P and D."""
        for engine in self._joined:
            engine.close()

    def _require_that_counters_grow(self) -> None:
        for number, engine in enumerate(self._engines):
            snapshot = engine.statistics()
            for name, value in snapshot.connector.items():
                before, self._figures[number, name] = self._figures.get((number, name), 0.0), value
                is_gauge = name in snapshot.connector_gauges
                assert is_gauge or value >= before, f"{name} fell from {before} to {value}; add it to `gauges`"


def single_hand_off(folder: Path, connector: str, extra: dict[str, Any]) -> None:
    """Hand a request from one engine to another with a connector, for tests of the transport that a connector uses.
    Fails unless the KV arrived and the answer is the same as one engine's alone."""
    model = make_random_model(folder / "model")
    with closing(Engine(_engine_config(model))) as alone, closing(EnginePair(model, connector, extra, alone)) as pair:
        with pair.loads(PROMPT):
            pair.decoded("d", PROMPT, pair.prefilled("t", PROMPT))
        assert pair.tokens("d") == pair.expected(PROMPT)
        pair.settle()


class ConnectorContract:
    """The suite for any connector. Set `connector` in a subclass; `extra` gives its `kv_connector_extra_config`."""

    connector: ClassVar[str]
    roles: ClassVar[Sequence[str]] = P_AND_D
    """The `kv_role` of each engine."""

    def extra(self, folder: Path) -> dict[str, Any]:
        """The options of both sides. `folder` is an empty directory of this test."""
        return {}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A small model with random weights."""
        return make_random_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, model: Path) -> Iterator[Engine]:
        """An engine without a connector."""
        with closing(Engine(_engine_config(model))) as engine:
            yield engine

    @pytest.fixture
    def pair(self, model: Path, alone: Engine, tmp_path: Path) -> Iterator[EnginePair]:
        """P and D, which must have released everything at the end of the test."""
        folder = tmp_path / "connector"
        folder.mkdir()
        pair = EnginePair(model, self.connector, self.extra(folder), alone, self.roles)
        try:
            yield pair
            pair.settle()
        finally:
            pair.close()

    def test_requests_without_hand_off(self, pair: EnginePair) -> None:
        """Several at once on each engine, of which one is aborted. D loads what it finds in a store that both share."""
        prompts = {f"r{number}": [number + 2, *PROMPT[: 30 - 9 * number]] for number in range(4)}
        engines = {"p": pair.prefill, "d": pair.decode} if pair.prefill is not pair.decode else {"d": pair.decode}
        with pair.may_load():
            for name, prompt in prompts.items():
                for role, engine in engines.items():
                    pair.add(engine, f"{name}-{role}", prompt)
                pair.step(pair.decode)
            pair.decode.abort("r1-d")
            ends = {f"{name}-{role}": pair.finish(f"{name}-{role}") for name in prompts for role in engines}
        assert ends.pop("r1-d").finish_reason in ("abort", "length")
        for name, end in ends.items():
            assert end.finish_reason == "length", end
            assert pair.tokens(name) == pair.expected(prompts[name[:2]])

    def test_it_declares_that_it_hands_off_or_that_it_is_a_cache(self) -> None:
        """`MultiConnector` decides by the classes that a connector's sides are derived from."""
        spec = find_connector(KVTransferConfig(kv_connector=self.connector))
        assert issubclass(spec.scheduler_class(), HandsOff | KeepsBlocks), "derive it from HandsOff or KeepsBlocks"

    def test_an_unknown_option_is_an_error_before_anything_is_started(self, tmp_path: Path) -> None:
        """`ConnectorSpec.options` names the class that is checked against."""
        extra = {**self.extra(tmp_path), "no_such_option": 1}
        config = KVTransferConfig(kv_connector=self.connector, kv_connector_extra_config=extra)
        with pytest.raises(ConfigError, match="no_such_option"):
            find_connector(config).check(config)


class CacheContract(ConnectorContract):
    """The suite for connectors that keep blocks for reuse without loss. The engine's own prefix cache is off, so
    that all reused KV has come through the connector."""

    roles: ClassVar[Sequence[str]] = ("kv_both",)

    def _answer(self, pair: EnginePair, name: str, prompt: list[int]) -> None:
        """Have the engine answer the prompt, and compare the answer."""
        pair.add(pair.decode, name, prompt)
        assert pair.finish(name).finish_reason == "length"
        assert pair.tokens(name) == pair.expected(prompt)

    def _answer_until_kept(self, pair: EnginePair, prompt: list[int]) -> None:
        """Have the engine answer the prompt repeatedly until all of it is stored."""
        usable = _usable(prompt)
        for attempt in range(200):
            before = pair.decode.statistics().external_kv.num_external_hits
            with pair.may_load():
                self._answer(pair, f"again-{attempt}-{prompt[0]}-{len(prompt)}", prompt)
            if pair.decode.statistics().external_kv.num_external_hits - before == len(usable):
                return
            pair.settle()
        raise AssertionError("the KV of a prompt never came back")

    @pytest.mark.parametrize("num_tokens", LENGTHS)
    def test_a_prompt_comes_back(self, pair: EnginePair, num_tokens: int) -> None:
        """Its full blocks come back, of which the last token is computed again."""
        prompt = PROMPT[:num_tokens]
        with pair.loads():
            self._answer(pair, "first", prompt)
        self._answer_until_kept(pair, prompt)
        with pair.loads(_usable(prompt)):
            self._answer(pair, "last", prompt)

    def test_the_beginning_of_a_prompt_comes_back(self, pair: EnginePair) -> None:
        """Nothing comes back for another beginning with the same end, nor of a block that is not full."""
        self._answer_until_kept(pair, PROMPT)
        with pair.loads(PROMPT[:24]):
            self._answer(pair, "longer", [*PROMPT[:24], 3, 1, 4, 1, 5])
        with pair.loads():
            self._answer(pair, "other", [9, *PROMPT[1:]])
            self._answer(pair, "short", PROMPT[: BLOCK_SIZE - 1])

    def test_a_load_that_is_aborted(self, pair: EnginePair) -> None:
        """Its blocks go back to the pool once nothing writes to them any more."""
        self._answer_until_kept(pair, PROMPT)
        with pair.may_load():
            pair.add(pair.decode, "gone", PROMPT)
            pair.step(pair.decode)
            pair.decode.abort("gone")
            assert pair.finish("gone").finish_reason in ("abort", "length")
        with pair.loads(_usable(PROMPT)):
            self._answer(pair, "next", PROMPT)

    def test_a_cache_that_is_reset(self, pair: EnginePair) -> None:
        """Nothing is loaded after a successful reset; in any case the connector keeps working."""
        self._answer_until_kept(pair, PROMPT)
        side = pair.decode.scheduler_side
        assert side is not None
        assert isinstance(side, KeepsBlocks)
        if side.reset_cache():
            with pair.loads():
                self._answer(pair, "after", PROMPT)
        self._answer_until_kept(pair, OTHER_PROMPT)

    def test_it_tells_whether_its_kv_is_exact(self, tmp_path: Path) -> None:
        """This suite is for KV without loss."""
        extra = self.extra(tmp_path)
        config = KVTransferConfig(kv_connector=self.connector, kv_connector_extra_config=extra)
        assert lossy_codecs(find_connector(config), config) == []


class HandOffContract(ConnectorContract):
    """The suite for connectors that hand off from P to D."""

    takes_early: ClassVar[bool] = False
    """True if KV arrives also for requests that D gets before P has begun (concurrent hand-off). The answer is right in
    any case: D computes missing KV."""

    @pytest.mark.parametrize("num_tokens", LENGTHS)
    def test_the_kv_of_a_hand_off_is_loaded_and_the_answer_is_the_same(self, pair: EnginePair, num_tokens: int) -> None:
        """D does not compute the prompt again."""
        prompts = (PROMPT[:num_tokens], OTHER_PROMPT, PROMPT[:num_tokens])
        for number, prompt in enumerate(prompts):
            with pair.loads(prompt):
                end = pair.decoded(f"d{number}", prompt, pair.prefilled(f"t{number}", prompt))
            assert end.finish_reason == "length", end
            assert pair.tokens(f"d{number}") == pair.expected(prompt)

    def test_several_hand_offs_at_once(self, pair: EnginePair) -> None:
        """Several prompts, prefilled one after the other and fetched together."""
        prompts = {f"m{number}": [number + 2, *PROMPT[number:]] for number in range(4)}
        tickets = {name: pair.prefilled(name, prompt) for name, prompt in prompts.items()}
        with pair.loads(*prompts.values()):
            for name, prompt in prompts.items():
                pair.add(pair.decode, name, prompt, parse_hand_off(tickets[name], name))
            for name in prompts:
                assert pair.finish(name).finish_reason == "length"
        for name, prompt in prompts.items():
            assert pair.tokens(name) == pair.expected(prompt)

    def test_concurrent_hand_offs(self, pair: EnginePair) -> None:
        """D gets its requests before P has begun: before P has the request, or in the same step, and several at
        once."""
        prompts = {f"c{number}": [number + 2, *PROMPT[number:]] for number in range(4)}
        with pair.loads(*prompts.values()) if self.takes_early else pair.loads_or_fails():
            for number, (name, prompt) in enumerate(prompts.items()):
                pair.consume_early(name, f"t-{name}", prompt)
                if number % 2 == 0:
                    pair.step(pair.decode)
            for name, prompt in reversed(prompts.items()):
                pair.add(pair.prefill, f"p-{name}", prompt, Produce(f"t-{name}"))
            for name in prompts:
                assert pair.finish(name).finish_reason == "length"
        for name, prompt in prompts.items():
            assert pair.tokens(name) == pair.expected(prompt)
            pair.finish(f"p-{name}")
            pair.prefill.release(f"t-{name}")

    @pytest.mark.parametrize("end", ["aborted", "of another prompt"])
    def test_a_concurrent_hand_off_that_never_comes(self, pair: EnginePair, end: str) -> None:
        """P's client disconnects, or P gets another prompt: D computes the prompt, in bounded time."""
        with pair.fails_to_load():
            pair.consume_early("d", "t", PROMPT)
            pair.step_until(lambda: not pair.decode.scheduler.is_empty, "D to have the request")
            pair.add(pair.prefill, "p", OTHER_PROMPT if end == "of another prompt" else PROMPT, Produce("t"))
            if end == "aborted":
                pair.prefill.abort("p")
            pair.finish("d")
        assert pair.tokens("d") == pair.expected(PROMPT)
        pair.finish("p")
        pair.prefill.release("t")

    def test_a_concurrent_hand_off_whose_consumer_leaves(self, pair: EnginePair) -> None:
        """The consumer leaves before P has begun: P's blocks are free again once the router has released the ticket."""
        with pair.may_load() if self.takes_early else pair.loads_or_fails():
            pair.consume_early("gone", "t", PROMPT)
            pair.step(pair.decode)
            pair.decode.abort("gone")
            pair.finish("gone")
        pair.add(pair.prefill, "p", PROMPT, Produce("t"))
        pair.finish("p")
        pair.prefill.release("t")

    def test_each_reads_the_tickets_that_the_other_writes(self, pair: EnginePair) -> None:
        """Otherwise a router would not pair them."""
        prefill, decode = pair.prefill.hands_off, pair.decode.hands_off
        assert prefill is not None
        assert decode is not None
        assert prefill.tickets().is_readable_by(decode.tickets())

    def test_a_ticket_of_another_prompt_never_gives_wrong_tokens(self, pair: EnginePair) -> None:
        """KV for other tokens is refused, and D computes the prompt."""
        with pair.fails_to_load():
            pair.decoded("d", OTHER_PROMPT, pair.prefilled("t", PROMPT))
        assert pair.tokens("d") == pair.expected(OTHER_PROMPT)
        pair.prefill.release("t")

    def test_a_ticket_that_is_used_twice(self, pair: EnginePair) -> None:
        """The second request's answer is right, with or without the KV."""
        ticket = pair.prefilled("t", PROMPT)
        with pair.loads(PROMPT):
            pair.decoded("first", PROMPT, ticket)
        with pair.loads_or_fails():
            pair.decoded("second", PROMPT, ticket)
        assert pair.tokens("first") == pair.tokens("second") == pair.expected(PROMPT)

    def test_a_hand_off_that_is_never_fetched_can_be_released(self, pair: EnginePair) -> None:
        """A router releases it when the client has disconnected."""
        pair.prefilled("t", PROMPT)
        pair.prefill.release("t")  # False for a connector that keeps nothing at P
        pair.settle()
        assert pair.prefill.release("t") is False, "there is nothing left to release"

    def test_a_request_that_is_aborted_while_its_kv_comes(self, pair: EnginePair) -> None:
        """Its blocks go back to the pool once nothing writes to them any more."""
        ticket = pair.prefilled("t", PROMPT)
        with pair.may_load():
            pair.add(pair.decode, "gone", PROMPT, parse_hand_off(ticket, "gone"))
            pair.step(pair.decode)
            pair.decode.abort("gone")
            pair.prefill.release("t")
            assert pair.finish("gone").finish_reason in ("abort", "length")
        with pair.loads(PROMPT):
            pair.decoded("next", PROMPT, pair.prefilled("t2", PROMPT))
        assert pair.tokens("next") == pair.expected(PROMPT)


def _usable(prompt: list[int]) -> list[int]:
    """The tokens of a prompt that can come back from a cache: full blocks that do not contain its last token."""
    return prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]


def _engine_config(model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        kv_cache_memory="8MiB",
        prefix_caching=False,
    )
