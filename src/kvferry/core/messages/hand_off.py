"""The hand-off of one request from a prefill instance to a decode instance, as it travels in `kv_transfer_params`.

The keys are vLLM's (`do_remote_decode`, `do_remote_prefill`, `remote_engine_id`, `remote_host`, `remote_port`,
`remote_request_id`, `remote_block_ids`, `remote_num_tokens`, `tp_size`) and kvferry's own:

| key | meaning |
|---|---|
| `transfer_id` | names the hand-off, on all ranks |
| `remote_ranks` | [host, port] of each rank of P if there are several; the first is `remote_host`, `remote_port` |
| `prefill_result` | P's first token, its seed, what drew it, and P's timeline |
| `keep_for_next_turn` | true: D keeps its blocks and answers with a ticket for the next P; false: it must not |
| `remote_transfer_id` | in that ticket: the transfer id under which D keeps them |
| `remote_prefixes` | [number of tokens, digest of them and of the salt] of the prefixes that there is KV for |
| `remote_stores` | P's stores that have the KV: they accepted all that P last wrote to them |
| `disaggregated_params` | the response of Dynamo's prefill worker for the decode worker, as JSON text |
| `remote_address_seal` | authenticates the addresses (`core.messages.ticket_seal`) |
| `remote_seal` | authenticates everything else that D acts on |

A program that only forwards a ticket need not know any of them. All fields are validated, within bounds, before they
are used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.blocks.block_hash import token_bytes
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.timeline import Timeline

HAND_OFF_FIELD = "kv_transfer_params"
"""The field of a request's body with its hand-off parameters, and of a response with the ticket."""
MAX_RANKS = 64
MAX_TOP = 1024
"""Max number of most likely tokens at one position."""
MAX_GROUPS = 64
MAX_BLOCK_IDS = 2**20
MAX_PREFIXES = 64
MAX_STORES = 16
MAX_FOREIGN = 2**20
"""Characters of another stack's ticket, at most."""
OTHER_PROMPT = (
    "the hand-off has other tokens than this request, or other images, another LoRA adapter or cache_salt: the prompt"
    " must be the same on both instances"
)

Count = Annotated[int, Meta(ge=0, lt=2**31)]
TransferId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,256}\Z")]
Name = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\ud800-\udfff]{0,1024}\Z")]
HOST_PATTERN = r"^(?!.*\.\.)(?!\.)[A-Za-z0-9_.:%-]{0,253}\Z"
Host = Annotated[str, Meta(pattern=HOST_PATTERN, description="a name or an address of a machine")]
"""A host name or an address, or nothing."""
Port = Annotated[int, Meta(ge=0, lt=2**16)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Seal = Annotated[str, Meta(max_length=128)]
_TRANSFER_ID = re.compile(r"[\x21-\x7e]{1,256}")


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The log-probability of one token at its position, its rank among all tokens there (1: the most likely), and the
    most likely tokens (`top`: id → log-probability)."""

    token_id: Count
    logprob: Annotated[float, Meta(le=1.0)]
    rank: Count
    top: Annotated[dict[Count, Annotated[float, Meta(le=1.0)]], Meta(max_length=MAX_TOP)] = {}


class PrefillResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """P's result besides the KV, at the end of its prefill: the sampled token, and the seed that it was sampled with.
    The seed may be missing from engines without counter-based sampling. `drawn_by`: the model and the sampling
    parameters that drew the token (`core.sampling.sampling_digest`); empty from engines that do not say. D uses the
    token only if it would have drawn it in the same way."""

    first_token: Count
    seed: int | None = None
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: Count = 0
    drawn_by: Annotated[str, Meta(max_length=64)] = ""
    timeline: Timeline = msgspec.field(default_factory=Timeline)

    def __post_init__(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError("a seed of more than 64 bits")


RankAddress = tuple[Host, Port]
"""Host and port of one rank."""


class Ticket(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parameters with which D fetches one hand-off.

    In a *concurrent* hand-off, the ticket contains only `transfer_id` and P's address: D sends its request before P has
    finished, and `prefill_result` follows over the control connection.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_id: TransferId
    remote_engine_id: Name = ""
    remote_request_id: Name = ""
    remote_host: Host = ""
    remote_port: Port = 0
    remote_block_ids: (
        Annotated[list[Annotated[list[Count], Meta(max_length=MAX_BLOCK_IDS)]], Meta(max_length=MAX_GROUPS)] | None
    ) = None
    remote_num_tokens: Count = 0
    tp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    prefill_result: PrefillResult | None = None
    remote_ranks: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)] | None = None
    remote_prefixes: Annotated[list[tuple[Count, Digest]], Meta(max_length=MAX_PREFIXES)] | None = None
    remote_stores: Annotated[list[Name], Meta(max_length=MAX_STORES)] | None = None
    """The stores of a hand-off through stores, in the connector's words; None: not known."""
    disaggregated_params: Annotated[str, Meta(max_length=MAX_FOREIGN)] = ""
    """JSON as text: it is sealed, and proxies do not write the numbers in it anew."""
    remote_address_seal: Seal = ""
    remote_seal: Seal = ""

    @property
    def is_early(self) -> bool:
        """True if the ticket was made before the prefill had ended, for a concurrent hand-off."""
        return not self.remote_num_tokens

    @property
    def has_address(self) -> bool:
        """True if the ticket has an address of P."""
        return bool(self.remote_host or self.remote_port or self.remote_ranks)

    @property
    def addresses(self) -> Sequence[RankAddress]:
        """The address of each rank of P, in rank order."""
        return self.remote_ranks or [(self.remote_host, self.remote_port)]

    def agrees_with(self, tokens: Sequence[int], salt: str = "") -> bool:
        """True if the ticket's digests, as far as it has any, do not exclude that it is for these tokens or for a
        prefix of them. `salt`: everything else that their KV depends on."""
        num = self.remote_num_tokens
        return num <= len(tokens) and (not self.remote_prefixes or self.common_prefix(tokens, salt) >= num)

    def is_of(self, tokens: Sequence[int], salt: str = "") -> bool:
        """True if the ticket is for exactly these tokens, so that P's first token follows them."""
        return self.remote_num_tokens in (0, len(tokens)) and self.agrees_with(tokens, salt)

    def common_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """Number of the first `tokens` that the other side has KV for, according to the ticket's digests."""
        return common_prefix(self.remote_prefixes or (), tokens, salt)

    def to_params(self) -> dict[str, Any]:
        """The ticket as a JSON-able dictionary for `kv_transfer_params`."""
        params = msgspec.json.decode(msgspec.json.encode(self))
        return {"do_remote_prefill": True, "do_remote_decode": False, "tp_size": self.tp_size, **params}


def common_prefix(prefixes: Iterable[tuple[int, str]], tokens: Sequence[int], salt: str = "") -> int:
    """The length in tokens of the longest of these prefixes, each given as (length, digest), that `tokens` begin with;
    0 if there is none."""
    candidates = [(num, name) for num, name in prefixes if 0 < num <= len(tokens)]
    digests = dict(prefix_digests(tokens, sorted({num for num, _ in candidates}), salt))
    return max((num for num, name in candidates if digests[num] == name), default=0)


class Produce(msgspec.Struct, frozen=True):
    """The request's prefill on P: compute the prompt, keep its KV for D, and answer with a ticket.

    `source`: a ticket with which KV of an earlier turn can be fetched first.
    """

    transfer_id: str
    source: Ticket | None = None


class Consume(msgspec.Struct, frozen=True):
    """The request on D: fetch the prompt's KV with a ticket, and decode.

    `keep`: afterwards keep D's own KV for the prefill of the next turn, and answer with a ticket too. None: as the
    instance is configured. A router whose clients may not have tickets sends False.
    """

    ticket: Ticket
    keep: bool | None = None


HandOff = Produce | Consume | None
"""A request's part in a hand-off; None: it has none."""


def prefix_digests(tokens: Sequence[int], lengths: Iterable[int], salt: str = "") -> list[tuple[int, str]]:
    """(length, digest of the salt and the first `length` tokens), for ascending lengths."""
    hasher, start, digests = hashlib.sha256(), 0, []
    if salt:
        hasher.update(hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest())
    for length in lengths:
        hasher.update(token_bytes(tokens[start:length]))
        digests.append((length, hasher.hexdigest()[:32]))
        start = length
    return digests


def parse_hand_off(params: dict[str, Any] | None, request_id: str) -> HandOff:
    """Read a request's `kv_transfer_params`. Unknown keys are ignored, as in vLLM.

    Raises `InvalidRequest` if both directions are asked for, or if a known key has a wrong value.
    """
    if not params:
        return None
    produce, consume = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    if produce and consume:
        raise InvalidRequest("do_remote_decode and do_remote_prefill exclude each other", param="kv_transfer_params")
    if not produce and not consume:
        return None
    params = {key: value for key, value in params.items() if value is not None}
    try:
        return _read_produce(params, request_id) if produce else _read_consume(params, request_id)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"kv_transfer_params: {error}", param="kv_transfer_params") from error


def _read_produce(params: dict[str, Any], request_id: str) -> Produce:
    source_id = params.get("remote_transfer_id")
    if source_id is None or "remote_host" not in params:
        transfer_id = params.get("transfer_id") or params.get("remote_request_id") or _own_transfer_id(request_id)
        return Produce(msgspec.convert(transfer_id, TransferId))
    source = msgspec.convert({**params, "transfer_id": source_id}, Ticket, strict=False)
    return Produce(msgspec.convert(params.get("transfer_id") or _own_transfer_id(request_id), TransferId), source)


def _own_transfer_id(request_id: str) -> str:
    """The transfer id of a request without one: the request's id, or a hash of it if it is not a valid transfer id."""
    if _TRANSFER_ID.fullmatch(request_id):
        return request_id
    return hashlib.sha256(request_id.encode("utf-8", "replace")).hexdigest()


def _read_consume(params: dict[str, Any], request_id: str) -> Consume:
    params.setdefault("transfer_id", params.get("remote_request_id") or _own_transfer_id(request_id))
    keep = params.get("keep_for_next_turn")
    return Consume(msgspec.convert(params, Ticket, strict=False), None if keep is None else bool(keep))
