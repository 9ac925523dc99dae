"""The engine as the server sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from kvferry.core.messages.hand_off import HandOff
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.statistics import EngineSnapshot


class EngineFront(Protocol):
    """What the server needs of an engine. Everything is called on the server's event loop, and nothing blocks."""

    @property
    def engine_id(self) -> str:
        """Names this engine, and no other, for as long as its process lives."""

    @property
    def model_names(self) -> Sequence[str]:
        """The names of the model; the first one is used in answers."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller than this."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers, with `backend_tokenizer` and, for chat models, a chat template."""

    @property
    def model_identity(self) -> str:
        """The name of the model as it computes (`KVLayout.model_identity`)."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The model's `generation_config`, for requests without their own sampling parameters."""

    @property
    def healthy(self) -> bool:
        """True if requests can be served now."""

    def describe(self) -> InstanceFacts:
        """What a router has to know about this instance."""

    def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """The outputs as they come. An asynchronous generator: closing it ends the request and frees everything it
        holds. Raises `RequestError`."""

    async def release(self, transfer_id: str) -> bool:
        """End the lease of a hand-off that nobody will fetch. True if there was one."""

    def continues(self, sampling: SamplingParams, *, is_seeded: bool) -> bool:
        """Whether another instance of this kind can continue an answer in the middle, so that it is the same answer.
        `is_seeded`: the client gave the seed."""

    def refused(self, hand_off: HandOff) -> None:
        """A request was refused before `generate`: tell the instance that waits for its KV, or holds KV for it. Returns
        at once."""

    async def kept(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        """What the connector's store has of a prompt. `pin` true: pin it there; false: unpin it; None: change nothing.
        Raises `InvalidRequest`, also if there is no store."""

    async def statistics(self) -> EngineSnapshot:
        """Gauges, and counters since the start. Raises `Unavailable` if the engine has ended, as the other methods
        do."""

    async def check(self) -> None:
        """Raise `LeakError` if no request is left, but something is still held."""
