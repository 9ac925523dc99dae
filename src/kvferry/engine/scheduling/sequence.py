"""One request inside the engine: its tokens, its blocks and its progress. No tensors."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from enum import Enum

from kvferry.core.blocks.block_hash import BlockHash, extend_hashes, root_hash
from kvferry.core.messages.hand_off import Consume, HandOff, PrefillResult, Produce, Ticket, TokenLogprobs
from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.core.request import FinishReason, Request
from kvferry.engine.scheduling.speculation import DraftState


class Status(Enum):
    """The status of a sequence. Only RUNNING sequences are scheduled."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class LoadMeetingPoint:
    """The KV of tokens `[start, end)` is loaded while the tokens before `start` are computed. `is_loaded`: the KV has
    arrived."""

    start: int
    end: int
    is_loaded: bool = False


@dataclass(slots=True)
class LoadState:
    """The state of a sequence's load through the connector. `is_settled`: nothing more will be loaded, and missing KV
    is computed. `target`: while LOADING, the number of tokens with KV after the load. `layerwise_base`: during a
    layerwise load, the number of computed tokens before it, to which the sequence goes back if the load fails.
    `meeting`: set while the sequence's beginning is computed and later tokens are loaded. `rejects_first_token`: the
    first token of P is not used, because P has another model or other sampling parameters."""

    is_settled: bool = False
    target: int = 0
    layerwise_base: int | None = None
    meeting: LoadMeetingPoint | None = None
    rejects_first_token: bool = False


class BlockHashChain:
    """The hashes of a sequence's full blocks, and the number of these blocks in the prefix cache. In a sequence longer
    than `trained_context`, the same tokens have other KV, and so other hashes."""

    __slots__ = (
        "_hashes",
        "_is_hashed_as_long",
        "_model",
        "_root",
        "_salt",
        "block_size",
        "num_cached_blocks",
        "trained_context",
    )

    def __init__(self, block_size: int, model: str, salt: str, trained_context: int | None) -> None:
        self.block_size, self.trained_context = block_size, trained_context
        self.num_cached_blocks = 0
        self._model, self._salt = model, salt
        self._hashes: list[BlockHash] = []
        self._is_hashed_as_long = False
        self._root = root_hash(model, salt)

    def is_long(self, num_tokens: int) -> bool:
        """True if a sequence of `num_tokens` is longer than the trained context."""
        return self.trained_context is not None and num_tokens > self.trained_context

    def extend(self, tokens: abc.Sequence[int]) -> list[BlockHash]:
        """The hashes of the full blocks of `tokens`, which only grow from one call to the next."""
        if self._is_hashed_as_long != (is_long := self.is_long(len(tokens))):
            self._hashes, self._is_hashed_as_long = [], is_long
            self._root = root_hash(f"{self._model}/long" if is_long else self._model, self._salt)
        extend_hashes(self._hashes, self._root, tokens, self.block_size)
        return self._hashes


class Sequence:
    """A request and its progress. Satisfies `connectors.api.RequestView`.

    `num_computed_tokens` tokens have their KV in `block_ids`. The *known* tokens are the prompt and the answer so far;
    the KV of the last known token is computed when the token is the input of the next step.
    """

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        block_size: int,
        model_identity: str,
        trained_context: int | None = None,
    ) -> None:
        self.request = request
        self.order = order
        self.tokens: list[int] = [*request.prompt_token_ids, *request.answer_token_ids]
        self.status = Status.WAITING
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_restarts = 0
        self.matcher = request.matcher
        """The state of the request's grammar after all tokens of the answer."""
        self.load = LoadState()
        self.hash_chain = BlockHashChain(block_size, model_identity, request.cache_salt, trained_context)
        self.prefill_result: PrefillResult | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.drafts: DraftState | None = None
        """None: nothing has been drafted for it."""

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> abc.Sequence[int]:
        """The prompt's tokens."""
        return self.request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def seed(self) -> int:
        """The seed of all its random numbers: from P's result, or else from the request."""
        result = self.prefill_result
        return result.seed if result is not None and result.seed is not None else self.request.sampling.seed or 0

    @property
    def salt(self) -> str:
        """The request's cache salt."""
        return self.request.cache_salt

    @property
    def hand_off(self) -> HandOff:
        """The request's part in a hand-off."""
        return self.request.hand_off

    @property
    def transfer_params(self) -> KVTransferParams | None:
        """The keys under which the request stores and loads KV."""
        return self.request.transfer_params

    @property
    def produces(self) -> bool:
        """True if this instance prefills the request for another one."""
        return isinstance(self.request.hand_off, Produce)

    @property
    def consumes(self) -> bool:
        """True if another instance prefills the request."""
        return isinstance(self.request.hand_off, Consume)

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Hashes of the full blocks of the prompt."""
        return self.hashes()[: self.num_prompt_tokens // self.hash_chain.block_size]

    def hashes(self) -> list[BlockHash]:
        """Hashes of the full blocks of all known tokens."""
        return self.hash_chain.extend(self.tokens)

    @property
    def is_long(self) -> bool:
        """True if the sequence is longer than the trained context, so that the model computes all of its KV
        differently."""
        return self.hash_chain.is_long(len(self.tokens))

    def can_use_remote_kv(self, num_tokens: int | None = None) -> bool:
        """True if this sequence can use the KV that the other side of a hand-off computed for `num_tokens` (None: the
        number in its ticket): the sequence and these tokens are both within the trained context, or both longer."""
        match self.hand_off:
            case Consume(ticket=ticket) | Produce(source=Ticket() as ticket):
                offered = num_tokens or ticket.remote_num_tokens or self.num_prompt_tokens
                return self.hash_chain.is_long(offered) == self.is_long
        return True

    @property
    def has_load_in_progress(self) -> bool:
        """True if a load writes to the sequence's blocks while it runs, so that they cannot be released."""
        meeting = self.load.meeting
        return meeting is not None and not meeting.is_loaded

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Number of known tokens whose KV is yet to be computed; while there is a meeting point, only of the tokens
        before it."""
        meeting = self.load.meeting
        return (len(self.tokens) if meeting is None else meeting.start) - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the lowest is served first."""
        return (self.request.priority, self.order)

    @property
    def reuses_prefix(self) -> bool:
        """True if cached KV may be used; False if the request needs the logits of every prompt position."""
        return self.request.sampling.prompt_logprobs is None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.hash_chain.block_size)

    def adopt(self, result: PrefillResult) -> None:
        """Use the result of the prefill instance: its seed, its number of cached tokens and its timeline."""
        self.prefill_result = result
        self.request.timeline.adopt(result.timeline)
        self.num_cached_tokens = result.num_cached_tokens
