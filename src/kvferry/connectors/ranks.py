"""One report for all ranks: what each rank's worker side says, until it is true of the whole instance.

Owns what some ranks have reported and others not yet. The engine gives it every rank's report, in any order and
at any time, and hands to its scheduler and to the connector's scheduler side only what `take` returns.

| of a request | holds for the instance when |
|---|---|
| `loaded` | every rank has loaded its share; `loaded_tokens` is the least of theirs |
| `failed` | any rank failed, and on every rank the load has ended, so that no rank still writes |
| `released` | every rank has released it |
| `prefill_results` | the first rank brings one: it is the same on all |

Each rank ends each load once, within its connector's own deadline, and so does the whole.
"""

from __future__ import annotations

from kvferry.connectors.api import TransferReport
from kvferry.core.errors import KvferryError, LeakError, LeaseEnded


class RankReports:
    """See the module. `num_ranks` worker sides report, as ranks 0, 1, …"""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks > 0, "an instance has at least one rank"
        self._num_ranks = num_ranks
        self._ended: dict[str, dict[int, KvferryError | None]] = {}
        self._tokens: dict[str, int] = {}
        self._released: dict[str, set[int]] = {}
        self._whole = TransferReport()

    def add(self, rank: int, report: TransferReport) -> None:
        """What `rank` had to say."""
        assert 0 <= rank < self._num_ranks, f"there is no rank {rank}"
        self._whole.prefill_results |= report.prefill_results
        for request_id, num_tokens in report.loaded_tokens.items():
            self._tokens[request_id] = min(num_tokens, self._tokens.get(request_id, num_tokens))
        for request_id in report.loaded:
            self._load_ended(rank, request_id, None)
        for request_id, error in report.failed.items():
            self._load_ended(rank, request_id, error)
        for request_id in report.released:
            self._rank_released(rank, request_id)

    def take(self) -> TransferReport:
        """What has become true of the whole instance since the last call."""
        whole, self._whole = self._whole, TransferReport()
        return whole

    def check(self) -> None:
        """Raise `LeakError` when some ranks have reported what others have not."""
        if names := [*self._ended, *self._released]:
            raise LeakError(f"only some ranks have ended the transfers of requests {', '.join(names[:8])}")

    def _load_ended(self, rank: int, request_id: str, error: KvferryError | None) -> None:
        ended = self._ended.setdefault(request_id, {})
        ended[rank] = error
        if len(ended) < self._num_ranks:
            return
        del self._ended[request_id]
        num_tokens = self._tokens.pop(request_id, None)
        errors = [error for error in ended.values() if error is not None]
        if errors:
            # A rank that fails gives the hand-off up, so that its lease ends for the others: that is no cause.
            causes = [error for error in errors if not isinstance(error, LeaseEnded)]
            self._whole.failed[request_id] = [*causes, *errors][0]
        else:
            self._whole.loaded.add(request_id)
            if num_tokens is not None:
                self._whole.loaded_tokens[request_id] = num_tokens

    def _rank_released(self, rank: int, request_id: str) -> None:
        released = self._released.setdefault(request_id, set())
        released.add(rank)
        if len(released) == self._num_ranks:
            del self._released[request_id]
            self._tokens.pop(request_id, None)
            self._ended.pop(request_id, None)  # a load that was cancelled ends as released on the ranks it had not
            self._whole.released.add(request_id)
