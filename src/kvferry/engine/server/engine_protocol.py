"""The server's interface to the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Protocol

from kvferry.core.messages.hand_off import HandOff
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.statistics import EngineSnapshot


class EngineClient(Protocol):
    """The engine methods that the server needs. All are called on the server's event loop, and none blocks."""

    @property
    def engine_id(self) -> str:
        """A unique name of this engine while its process lives."""

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
        """The facts about this instance for routers."""

    def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """The outputs as they come. An asynchronous generator: closing it ends the request and frees everything it
        holds. Raises `RequestError`."""

    async def release(self, transfer_id: str) -> bool:
        """End the lease of a hand-off that will not be fetched. Returns True if there was one."""

    def continues(self, sampling: SamplingParams, *, is_seeded: bool) -> bool:
        """True if another instance of this kind can continue an answer in the middle without changing it. `is_seeded`:
        the client set the seed."""

    def refused(self, hand_off: HandOff) -> None:
        """Notify the instance that waits for the KV of a request that was refused before `generate`, or holds KV for
        it. Returns at once."""

    async def stored_blocks(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        """The blocks of a prompt in the connector's store. `pin` True: pin them; False: unpin them; None: change
        nothing. Raises `InvalidRequest`, also if there is no store."""

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks that no request uses. Returns False if others are left. Raises `Unavailable`."""

    def abort_requests(self, request_ids: Collection[str]) -> int:
        """End running requests with `RequestAborted`; all of them if `request_ids` is empty. An id is a client's, or an
        answer's. Returns their number."""

    async def statistics(self) -> EngineSnapshot:
        """Gauges, and counters since the start. Raises `Unavailable` if the engine has ended, as the other methods
        do."""

    async def check(self) -> None:
        """Raise `LeakError` if no request is left, but something is still held."""
