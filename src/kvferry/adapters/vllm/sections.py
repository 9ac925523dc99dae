"""The connector's view of a request for which vLLM has several block tables.

A model that mixes full attention and sliding windows has several KV cache groups in vLLM, each with its own block table
over one pool of equal blocks. Blocks before a window are freed while the request runs. The connector sees one request
for each group, a *section* (not the `Part` of a lookup buffer). Its prompt is the range that the group needs,
from the block in which the window begins; it has its own blocks and its own transfer id. So there is one hand-off for
each group, and the connector does not know about groups.

A section ends before the prompt's last token. The consumer computes that token again, for which it needs the token's
window. So the producer must keep that window: both sides compute where it begins with `first_block`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, overload

import msgspec

from kvferry.adapters.vllm.requests import RequestAdapter
from kvferry.connectors.api import RequestView, ScheduledChunk, TransferReport
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.messages.hand_off import Consume, HandOff, PrefillResult, Produce
from kvferry.core.messages.kv_keys import KVTransferParams

BlocksOf = Callable[[str], Sequence[Sequence[int]]]
"""vLLM's function from a request id to its block ids, by group."""


class WholeSection:
    """The only section of a request if there is one KV cache group: the whole request."""

    group = 0
    is_window = False

    def __init__(self, view: RequestAdapter) -> None:
        self.view: RequestView = view

    def blocks(self, block_ids: Sequence[Sequence[int]]) -> Sequence[int]:
        """The block ids of this section's group."""
        [group_blocks] = block_ids
        return group_blocks

    def num_tokens_within(self, num_tokens: int) -> int:
        """Number of tokens among the request's first `num_tokens` that lie in the section."""
        return num_tokens

    def chunk(self, start: int, num_tokens: int, blocks_of: BlocksOf, request_id: str) -> ScheduledChunk:
        """The section's share of a chunk of the request."""
        return ScheduledChunk(self.view, start, num_tokens, _Blocks(self, blocks_of, request_id))


class GroupSection:
    """One group's section of a request. `window`: the group's sliding window in tokens; None: full attention."""

    def __init__(self, view: RequestAdapter, group: int, window: int | None, block_size: int, *, is_main: bool) -> None:
        self.group, self.is_window = group, window is not None
        self._num_prompt = len(view.prompt_token_ids)
        self._first_block = first_block(_num_promised(view), window, block_size)
        self._first_token = self._first_block * block_size
        self.view: RequestView = _SectionView(
            view, self._first_token, section_request_id(view.request_id, group), None if is_main else group
        )

    def blocks(self, block_ids: Sequence[Sequence[int]]) -> Sequence[int]:
        """The block ids of this section's group."""
        return block_ids[self.group][self._first_block :]

    def num_tokens_within(self, num_tokens: int) -> int:
        """Number of tokens among the request's first `num_tokens` that lie in the section."""
        return max(0, min(num_tokens - self._first_token, len(self.view.prompt_token_ids)))

    def chunk(self, start: int, num_tokens: int, blocks_of: BlocksOf, request_id: str) -> ScheduledChunk:
        """The section's share of a chunk of the request. The last token of the section is left out until the whole
        prompt is computed, so that nothing is written to a block after its announcement."""
        first, end = self.num_tokens_within(start), self.num_tokens_within(start + num_tokens)
        if start + num_tokens < self._num_prompt:
            end = min(end, len(self.view.prompt_token_ids) - 1)
        return ScheduledChunk(self.view, first, max(0, end - first), _Blocks(self, blocks_of, request_id))


Section = WholeSection | GroupSection


class _SectionView:
    """A `RequestView` of one section. The KV of the answer is not kept for the next turn: the KV of a
    window can be reused only if all tokens up to the window are the same."""

    block_hashes: Sequence[BlockHash] = ()
    finish_reason: str | None = None
    transfer_params: KVTransferParams | None = None

    def __init__(self, view: RequestAdapter, first_token: int, request_id: str, group: int | None) -> None:
        self.request_id, self.salt = request_id, view.salt
        self.prompt_token_ids = view.prompt_token_ids[first_token : _num_handed_off(view)]
        self.hand_off = _hand_off_of(view.hand_off, first_token, group)
        self._view = view

    @property
    def prefill_result(self) -> PrefillResult | None:
        """The prefill result of the whole request."""
        return self._view.prefill_result

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the section, which has no answer."""
        return self.prompt_token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Always 0: computed tokens are not counted for a section."""
        return 0


class Partition:
    """Divides requests into sections. `windows`: each group's sliding window; None: full attention. The first group
    without a window is the main one, whose ticket is the request's."""

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        self._windows, self._block_size = windows, block_size
        self.num_groups = len(windows)
        self._groups = sorted(range(self.num_groups), key=lambda group: windows[group] is not None)

    def sections(self, view: RequestAdapter) -> list[Section]:
        """The sections of a request, the main one first."""
        if self.num_groups == 1:
            return [WholeSection(view)]
        main = self._groups[0]
        return [
            GroupSection(view, group, self._windows[group], self._block_size, is_main=group == main)
            for group in self._groups
        ]

    def request_ids(self, request_id: str) -> list[str]:
        """The request ids of a request's sections, the main one first."""
        if self.num_groups == 1:
            return [request_id]
        return [section_request_id(request_id, group) for group in self._groups]


def first_block(num_tokens: int, window: int | None, block_size: int) -> int:
    """Index of the first block of a group that is needed to compute the token after `num_tokens`. vLLM has freed the
    blocks before it, or never reserved them."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def section_request_id(request_id: str, group: int) -> str:
    """The request id of a section."""
    return f"{request_id}#{group}"


def by_group(report: TransferReport) -> dict[int, TransferReport]:
    """Divide a report about sections into one report for each group, with the ids of the whole requests."""
    reports: defaultdict[int, TransferReport] = defaultdict(list)
    for event in report:
        request_id, group = _split_request_id(event.request_id)
        reports[group].append(msgspec.structs.replace(event, request_id=request_id))
    return reports


def _split_request_id(name: str) -> tuple[str, int]:
    request_id, _, group = name.rpartition("#")
    return request_id, int(group)


def _num_handed_off(view: RequestAdapter) -> int:
    """Number of tokens whose KV is handed off."""
    return max(len(view.prompt_token_ids) - 1, 1)


def _num_promised(view: RequestAdapter) -> int:
    """Number of tokens whose KV the ticket promises: `remote_num_tokens`, which is set if the producer had only a
    prefix of the prompt, else `_num_handed_off`."""
    num_promised = view.hand_off.ticket.remote_num_tokens if isinstance(view.hand_off, Consume) else 0
    return num_promised or _num_handed_off(view)


def _hand_off_of(hand_off: HandOff, first_token: int, group: int | None) -> HandOff:
    """The hand-off of one section. `group` None: the main section, whose ticket is the request's. The KV of earlier
    turns is not fetched."""
    match hand_off:
        case Produce(transfer_id=transfer_id):
            return Produce(_transfer_id_of(transfer_id, group))
        case Consume(ticket=ticket) if group is None:
            return Consume(ticket)
        case Consume(ticket=ticket):
            num_tokens = ticket.remote_num_tokens and ticket.remote_num_tokens - first_token
            transfer_id = _transfer_id_of(ticket.transfer_id, group)
            fields = {"transfer_id": transfer_id, "remote_num_tokens": num_tokens, "remote_prefixes": None}
            return Consume(
                msgspec.structs.replace(ticket, **fields, prefill_result=None, remote_block_ids=None, remote_seal="")
            )
    return None


def _transfer_id_of(transfer_id: str, group: int | None) -> str:
    """The transfer id of a group. It is hashed, so that no request has the same transfer id."""
    if group is None:
        return transfer_id
    return hashlib.sha256(f"group {group} of {transfer_id}".encode()).hexdigest()


class _Blocks(Sequence[int]):
    """The block ids of a section, which are read from vLLM on first use."""

    def __init__(self, section: Section, blocks_of: BlocksOf, request_id: str) -> None:
        self._section, self._blocks_of, self._request_id = section, blocks_of, request_id
        self._block_ids: Sequence[int] | None = None

    def _ids(self) -> Sequence[int]:
        if self._block_ids is None:
            self._block_ids = self._section.blocks(self._blocks_of(self._request_id))
        return self._block_ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._ids()[index]

    def __len__(self) -> int:
        return len(self._ids())
