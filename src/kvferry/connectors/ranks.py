"""Joins the reports of all ranks' worker sides into one report of the whole instance.

Owns the events that some ranks have reported and others have not reported yet. It gets every rank's report, in any
order and at any time; the result of `take` is for the scheduler and for the connector's scheduler side. vLLM's adapter
also uses it to join the reports of the several hand-offs that form one request there.

| of a request | holds for the instance when |
|---|---|
| `Loaded` | every rank has loaded its share; `num_tokens` is the minimum over ranks, `seconds` the maximum |
| `Failed` | any rank failed, and on every rank the load has ended, so that no rank still writes, or keeps its blocks |
| `Released` | every rank has released it |
| `Prefilled`, `Fetchable` | any rank reports it: it is the same on all |
| `Saved` | any rank reports it; `stores` are the stores that accept the writes of each rank that has reported |

Each rank ends each load once, within its connector's own deadline, and so does the whole.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvferry.connectors.api import Failed, Fetchable, Loaded, Prefilled, Released, Saved, TransferReport
from kvferry.core.errors import LeakError, LeaseEnded


class RankReports:
    """The joined report of `num_ranks` worker sides, which report as ranks 0, 1, …"""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks > 0, "an instance has at least one rank"
        self._num_ranks = num_ranks
        self._ended: dict[str, dict[int, Loaded | Failed]] = {}
        self._released: dict[str, set[int]] = {}
        self._stores: dict[int, list[int]] = {}
        self._joined_report: TransferReport = []

    def add(self, rank: int, report: TransferReport) -> None:
        """Add a rank's report."""
        assert 0 <= rank < self._num_ranks, f"there is no rank {rank}"
        for event in report:
            match event:
                case Loaded() | Failed():
                    self._load_ended(rank, event)
                case Released(request_id):
                    self._rank_released(rank, request_id)
                case Prefilled() | Fetchable():
                    self._joined_report.append(event)
                case Saved(request_id, stores):
                    self._stores[rank] = stores
                    common = set(stores).intersection(*self._stores.values())
                    self._joined_report.append(Saved(request_id, sorted(common)))

    def take(self) -> TransferReport:
        """Return the events of the whole instance since the last call."""
        joined, self._joined_report = self._joined_report, []
        return joined

    def check(self) -> None:
        """Raise `LeakError` if some ranks have reported events that others have not."""
        if names := [*self._ended, *self._released]:
            raise LeakError(f"only some ranks have ended the transfers of requests {', '.join(names[:8])}")

    def _load_ended(self, rank: int, event: Loaded | Failed) -> None:
        ended = self._ended.setdefault(event.request_id, {})
        ended[rank] = event
        if len(ended) == self._num_ranks:
            del self._ended[event.request_id]
            held_under = next(
                (
                    rank_event.held_under
                    for rank_event in ended.values()
                    if isinstance(rank_event, Failed) and rank_event.held_under
                ),
                "",
            )
            joined = _joined(ended.values())
            self._joined_report.append(
                msgspec.structs.replace(joined, held_under=held_under) if isinstance(joined, Failed) else joined
            )
            for other_rank, rank_event in ended.items():
                if held_under and not (isinstance(rank_event, Failed) and rank_event.held_under):
                    self._rank_released(other_rank, held_under)

    def _rank_released(self, rank: int, request_id: str) -> None:
        released = self._released.setdefault(request_id, set())
        released.add(rank)
        if len(released) == self._num_ranks:
            del self._released[request_id]
            self._ended.pop(
                request_id, None
            )  # a cancelled load is reported as `Released` by ranks on which it had not ended
            self._joined_report.append(Released(request_id))


def _joined(ended: Collection[Loaded | Failed]) -> Loaded | Failed:
    """The end of a load that has ended on all ranks."""
    failed = [event for event in ended if isinstance(event, Failed)]
    if failed:
        # A rank that fails releases the hand-off, which ends the lease for the other ranks. So `LeaseEnded` is not the
        # cause.
        causes = [event for event in failed if not isinstance(event.error, LeaseEnded)]
        return [*causes, *failed][0]
    loaded = [event for event in ended if isinstance(event, Loaded)]
    token_counts = [event.num_tokens for event in loaded if event.num_tokens is not None]
    measured = [event.seconds for event in loaded if event.seconds is not None]
    return Loaded(loaded[0].request_id, min(token_counts, default=None), max(measured, default=None))
