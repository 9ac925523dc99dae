"""Which deployment serves a trace within its targets: a search over counts of P and D, plain instances, chunk sizes and
settings of the router.

An estimate from the times of steps rules out what cannot keep up, and orders the rest; the simulator decides. The
cheapest deployment that keeps the wanted share of requests within the targets is taken, and compared with the best of
the other kind, as there may be no reason to disaggregate. Settings of the router are tried for what was chosen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvferry.core.settings.units import percent
from kvferry.sim.kv_traffic import prefill_seconds, to_size
from kvferry.sim.replay import CompletedRequest, ReplayFigures, TraceReplay
from kvferry.sim.targets import Targets
from kvferry.sim.times import MachineTimes
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival
from kvferry.sim.world import WorldSpec

PLAIN_CHUNKS = (512, 2048)
"""Chunk sizes of plain instances: small ones stall answers less, large ones cost fewer steps."""
PREFILL_CHUNK = 2048
MAX_SPLITS = 3
"""Number of ways to divide instances into P and D that are simulated, the most balanced first."""
POLICIES = ("least_loaded", "prefix")
"""Policies that are tried beside `cost`, the router's own `prefix` is tried where prompts of the trace begin alike."""
BETTER_SHARE, BETTER_TAIL = 0.005, 0.9
"""P/D is preferred to as many plain instances if this much more of the requests is within the targets, or as many and
its tail is under this share of theirs; so are other settings of the router to its own."""
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the targets of the goodput grid."""


@dataclass(frozen=True, order=True)
class RouterSettings:
    """What a plan chooses of a router: `policy`, and `disaggregate_from` as its flag takes it."""

    policy: str = "cost"
    disaggregate_from: str = "auto"

    def flags(self) -> list[str]:
        """The flags of `kvferry router` for what is not its default."""
        default = vars(RouterSettings())
        return [f"--{name.replace('_', '-')}={one}" for name, one in vars(self).items() if one != default[name]]


@dataclass(frozen=True, order=True)
class Candidate:
    """A deployment: numbers of instances, and the most tokens in a step of those that prefill."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    chunk: int = PREFILL_CHUNK
    router: RouterSettings = RouterSettings()
    store_bytes: int = 0
    """Size of the store that all instances share; 0: there is none."""

    @property
    def num_instances(self) -> int:
        """Instances in all."""
        return self.prefill + self.decode + self.both

    @property
    def is_split(self) -> bool:
        """True if prefill and decode are on different instances."""
        return bool(self.prefill)

    def __str__(self) -> str:
        what = f"{self.prefill}P + {self.decode}D" if self.is_split else f"{self.both} plain"
        store = (f"a store of {to_size(self.store_bytes)}",) if self.store_bytes else ()
        return ", ".join((f"{what}, chunks of {self.chunk}", *self.router.flags(), *store))


@dataclass(frozen=True)
class DeploymentResult:
    """What a deployment did in the simulator."""

    candidate: Candidate
    figures: ReplayFigures
    answered: tuple[CompletedRequest, ...]

    def within(self, targets: Targets) -> float:
        """Share of all requests that met these targets."""
        met = sum(targets.met_by(one.ttft_s, one.e2e_s, one.num_tokens) for one in self.answered)
        return met / self.figures.requests

    def tail(self, targets: Targets) -> float:
        """The worst P99, as a multiple of its target; infinite if nothing was answered."""
        if not self.answered:
            return math.inf
        pairs = (
            (targets.ttft, self.figures.ttft.p99),
            (targets.itl, self.figures.itl.p99),
            (targets.e2e, self.figures.e2e.p99),
        )
        return max((found / most for most, found in pairs if most), default=0.0)


@dataclass(frozen=True)
class Estimate:
    """What a trace asks for, in seconds of instances per second, from the times of steps alone. `alone`: share of the
    requests that would miss a target even on an idle instance; `too_long`: of those that no instance takes. `fewest`:
    instances without which the share cannot be kept, for prefill, for decoding, and for both on the same ones."""

    prefill_s: float
    decode_s: float
    alone: float
    too_long: float = 0.0
    fewest: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def busy(self, candidate: Candidate) -> float:
        """Share of the time in which the busiest role computes; more than 1: it cannot keep up."""
        if candidate.is_split:
            return max(self.prefill_s / candidate.prefill, self.decode_s / candidate.decode)
        return (self.prefill_s + self.decode_s) / candidate.both

    def keeps_up(self, candidate: Candidate) -> bool:
        """True if each role has as many instances as it takes at least."""
        prefill, decode, both = self.fewest
        if candidate.is_split:
            return prefill <= candidate.prefill and decode <= candidate.decode
        return both <= candidate.both


def estimate(arrivals: Sequence[Arrival], times: MachineTimes, targets: Targets, share: float = 1.0) -> Estimate:
    """What a trace asks for at least: blocks that were there before are not computed again, and as many sequences
    decode together as the target between two tokens and the KV cache allow. `share`: of the requests that are to be
    within the targets."""
    step, seen = times.step, set[int]()
    answers = sum(one.answer_tokens for one in arrivals)
    context = sum((one.prompt_tokens + one.answer_tokens / 2) * one.answer_tokens for one in arrivals) / answers
    sequence_s = step.decode_sequence_s + step.context_token_s * context
    together = min(times.max_num_seqs, max(1, int(times.kv.num_tokens / max(1.0, context))))
    if targets.itl is not None and sequence_s:
        together = max(1, min(together, int((targets.itl - step.base_s) / sequence_s)))
    token_s = step.base_s / together + sequence_s
    ttft_s, itl_s, e2e_s = (math.inf if one is None else one for one in (targets.ttft, targets.itl, targets.e2e))
    prefills, decodes = list[tuple[float, float]](), list[tuple[float, float]]()
    num_late = num_too_long = 0
    for one in arrivals:
        known = sum(1 for block in one.block_ids if block in seen)
        seen.update(one.block_ids)
        left = max(1, one.prompt_tokens - known * BLOCK_TOKENS)
        seconds = prefill_seconds(step, left, PREFILL_CHUNK)
        prefills.append((one.at_s + min(ttft_s, e2e_s), seconds))
        decodes.append((one.at_s + min(ttft_s + itl_s * one.answer_tokens, e2e_s), one.answer_tokens * token_s))
        first_s = seconds + 4 * times.transfer.latency_s
        step_s = step.base_s + step.decode_sequence_s + step.context_token_s * one.prompt_tokens
        num_late += not targets.met_by(first_s, first_s + step_s * (one.answer_tokens - 1), one.answer_tokens)
        num_too_long += one.prompt_tokens + one.answer_tokens > min(times.max_model_len, times.kv.num_tokens)
    misses = len(arrivals) - math.ceil(share * len(arrivals) - 1e-9)
    fewest = _fewest(prefills, misses), _fewest(decodes, misses), _fewest([*prefills, *decodes], 2 * misses)
    span_s = max(arrivals[-1].at_s, 1.0) + (targets.ttft or 0.0)
    prefill_s, decode_s = (sum(seconds for _, seconds in jobs) / span_s for jobs in (prefills, decodes))
    return Estimate(prefill_s, decode_s, num_late / len(arrivals), num_too_long / len(arrivals), fewest)


def _fewest(jobs: Iterable[tuple[float, float]], misses: int) -> float:
    """The instances that all but `misses` of these jobs take at least. Each is (second until which it is to be done,
    seconds of an instance), and none begins before second 0."""
    longest: list[float] = []
    fewest = asked_s = 0.0
    for until_s, seconds in sorted(jobs):
        heapq.heappush(longest, seconds)
        if len(longest) > misses:
            asked_s += heapq.heappop(longest)
        fewest = max(fewest, asked_s / max(until_s, 1e-9))
    return fewest


def candidates(number: int, needs: Estimate, times: MachineTimes) -> list[Candidate]:
    """Candidates of `number` instances that may keep up: all chunk sizes if plain, else the most balanced splits. No
    chunk is smaller than a full batch of decodes."""
    chunks = sorted({max(times.max_num_seqs, min(one, times.max_model_len)) for one in PLAIN_CHUNKS})
    plain = [Candidate(both=number, chunk=chunk) for chunk in chunks]
    return [one for one in (*plain, *_splits(number, needs, times)[:MAX_SPLITS]) if needs.keeps_up(one)]


def _splits(number: int, needs: Estimate, times: MachineTimes) -> list[Candidate]:
    """All divisions into P and D, the most balanced first."""
    chunk = max(times.max_num_seqs, PREFILL_CHUNK)
    return sorted((Candidate(count, number - count, chunk=chunk) for count in range(1, number)), key=needs.busy)


@dataclass
class Planner:
    """One search. `world_of` makes a deployment of a candidate; `share`: of the requests that are to be within the
    targets."""

    arrivals: Sequence[Arrival]
    times: MachineTimes
    targets: Targets
    world_of: Callable[[Candidate], WorldSpec]
    share: float = 0.99
    seed: int = 0
    on_progress: Callable[[str, float], None] = lambda what, share: None
    tried: dict[Candidate, DeploymentResult] = field(default_factory=dict)

    def search(self, budget: int) -> SearchResult:
        """The cheapest deployment of at most `budget` instances that keeps the share; if none does, the best."""
        needs = estimate(self.arrivals, self.times, self.targets, self.share)
        keeping = [n for n in range(1, budget + 1) if candidates(n, needs, self.times)]
        failed, number = 0, keeping[0] if keeping else budget
        while not self._holds(number, needs) and number < budget:
            failed, number = number, min(budget, number + max(1, number // 4))
        while number - failed > 1 and self._holds(number, needs):  # larger steps may have passed the smallest
            middle = (failed + number) // 2
            if not [one for one in keeping if one <= middle]:
                break
            failed, number = (failed, middle) if self._holds(middle, needs) else (middle, number)
        return self._plan(number, needs)

    def with_store(self, found: SearchResult, num_bytes: int) -> SearchResult:
        """Try what was chosen with a store and, while that keeps the share, with fewer instances that prefill."""
        one = self._try(replace(found.chosen.candidate, store_bytes=num_bytes))
        while one.figures.within >= self.share and max(one.candidate.prefill, one.candidate.both) > 1:
            role = "prefill" if one.candidate.is_split else "both"
            fewer = self._try(replace(one.candidate, **{role: getattr(one.candidate, role) - 1}))
            if fewer.figures.within < self.share:
                break
            one = fewer
        return replace(found, with_store=one, tried=sorted(self.tried.values(), key=_order))

    def _others(self, candidate: Candidate) -> list[Candidate]:
        """A deployment with one setting of its router changed. The fixed threshold is the median prompt's length."""
        if candidate.num_instances == 1:
            return []
        names = POLICIES if any(one.block_ids for one in self.arrivals) else POLICIES[:1]
        settings = [RouterSettings(policy=one) for one in names]
        if candidate.is_split:
            middle = sorted(one.prompt_tokens for one in self.arrivals)[len(self.arrivals) // 2]
            settings += [RouterSettings(disaggregate_from=one) for one in ("0", str(middle))]
        return [replace(candidate, router=one) for one in settings]

    def _holds(self, number: int, needs: Estimate) -> bool:
        """True if a deployment of `number` instances keeps the share."""
        return any(one.figures.within >= self.share for one in self._try_all(number, needs))

    def _try_all(self, number: int, needs: Estimate) -> list[DeploymentResult]:
        chosen = candidates(number, needs, self.times)
        if not chosen:  # the best of both kinds, to say how far off they are
            plain = Candidate(both=number, chunk=max(self.times.max_num_seqs, PREFILL_CHUNK))
            chosen = [plain, *_splits(number, needs, self.times)[:1]]
        return [self._try(one) for one in chosen]

    def _try(self, candidate: Candidate) -> DeploymentResult:
        if candidate not in self.tried:
            replay = TraceReplay(self.world_of(candidate), self.arrivals, seed=self.seed)
            figures = replay.run(self.targets, lambda done: self.on_progress(str(candidate), done))
            self.tried[candidate] = DeploymentResult(candidate, figures, tuple(replay.answered))
        return self.tried[candidate]

    def _plan(self, number: int, needs: Estimate) -> SearchResult:
        at = [one for one in self._try_all(number, needs) if one.candidate.num_instances == number]
        plain = self._best(one for one in at if not one.candidate.is_split)
        split = self._best(one for one in at if one.candidate.is_split)
        found = SearchResult(self.targets, self.share, needs, plain, split)
        by_router = [found.by_kind, *(self._try(one) for one in self._others(found.by_kind.candidate))]
        return replace(found, by_router=by_router, tried=sorted(self.tried.values(), key=_order))

    def _best(self, found: Iterable[DeploymentResult]) -> DeploymentResult | None:
        return max(found, key=lambda one: (one.figures.within, -one.tail(self.targets)), default=None)


def _order(one: DeploymentResult) -> tuple[int, bool, Candidate]:
    return one.candidate.num_instances, one.candidate.is_split, one.candidate


@dataclass(frozen=True)
class SearchResult:
    """What a search found: the best plain and the best split deployment of the chosen number of instances."""

    targets: Targets
    share: float
    needs: Estimate
    plain: DeploymentResult | None
    split: DeploymentResult | None
    by_router: list[DeploymentResult] = field(default_factory=list)
    """Try the better of the two also with other settings of the router."""
    tried: list[DeploymentResult] = field(default_factory=list)
    """All deployments that were simulated, by their number of instances."""
    with_store: DeploymentResult | None = None
    """The chosen one with a store, and with as few instances as that needs; None: no store was tried."""

    @property
    def chosen(self) -> DeploymentResult:
        """What to run: with a store only if that needs fewer instances, or is clearly better."""
        one, before = self.with_store, self.without_store
        if one is None:
            return before
        is_smaller = one.candidate.num_instances < before.candidate.num_instances
        return one if is_smaller or self._is_better(one, before) else before

    @property
    def without_store(self) -> DeploymentResult:
        """What to run without a store: other settings of the router only if they are clearly better than its own."""
        best = self.by_kind
        for one in self.by_router[1:]:
            if self._is_better(one, best):
                best = one
        return best

    @property
    def by_kind(self) -> DeploymentResult:
        """The better one, plain or split, with the router's own settings."""
        if self.plain is None or self.split is None:
            found = self.split or self.plain
            assert found is not None, "every number of instances has a candidate"
            return found
        return self.split if self._is_better(self.split, self.plain) else self.plain

    def _is_better(self, one: DeploymentResult, other: DeploymentResult) -> bool:
        gain = one.figures.within - other.figures.within
        keeps = one.figures.within >= self.share
        if keeps != (other.figures.within >= self.share):
            return keeps
        if abs(gain) >= BETTER_SHARE:
            return gain > 0
        return one.tail(self.targets) < BETTER_TAIL * other.tail(self.targets)

    @property
    def holds(self) -> bool:
        """True if the chosen deployment keeps the share."""
        return self.chosen.figures.within >= self.share

    def reason(self) -> str:
        """Why to disaggregate or not, in numbers: both with the router's own settings."""
        chosen = self.by_kind
        head = "disaggregate" if chosen.candidate.is_split else "do not disaggregate"
        other = self.plain if chosen.candidate.is_split else self.split
        about = self._about(chosen)
        if other is None:
            why = (
                "one instance cannot be divided"
                if chosen.candidate.num_instances == 1
                else "the other way cannot keep up by the times of its steps"
            )
            return f"{head}: {about}; {why}"
        return f"{head}: {about}; with as many instances, {self._about(other)}"

    def router_reason(self) -> str:
        """Which settings of the router, in numbers; empty for one instance, where nothing is chosen."""
        chosen, default = self.without_store, self.by_kind
        if len(self.by_router) < 2:
            return ""
        others = "; ".join(self._by_router(one) for one in self.by_router if one is not chosen)
        return f"router: {self._by_router(chosen)}; {'not better' if chosen is default else 'before'}: {others}"

    def store_reason(self) -> str:
        """Whether a store is worth it, in numbers; empty if none was tried."""
        if self.with_store is None:
            return ""
        head = "a store" if self.chosen is self.with_store else "no store"
        return f"{head}: {self._about(self.with_store)}; without, {self._about(self.without_store)}"

    def _by_router(self, one: DeploymentResult) -> str:
        figures, flags = one.figures, " ".join(one.candidate.router.flags()) or "its own settings"
        times = f"P99 {figures.ttft.p99 * 1e3:.0f} ms and {figures.itl.p99 * 1e3:.1f} ms"
        return f"{flags} ({percent(figures.within)}%, {times})"

    def _about(self, one: DeploymentResult) -> str:
        figures = one.figures
        if not one.answered:
            return f"{one.candidate} answer no request ({', '.join(figures.reasons)})"
        return (
            f"{one.candidate} keep {percent(figures.within)}% within {self.targets} (P99:"
            f" {figures.ttft.p99 * 1e3:.0f} ms to the first token, {figures.itl.p99 * 1e3:.1f} ms between tokens;"
            f" {_busiest(figures)})"
        )

    def unreachable(self) -> str:
        """Why no number of instances would do; empty if that is not known."""
        if self.holds:
            return ""
        if self.needs.too_long > 1 - self.share:
            return (
                f"{self.needs.too_long:.1%} of the requests are longer than the model's context or an instance's KV"
                " cache: no number of instances changes that"
            )
        if self.needs.alone <= 1 - self.share:
            return ""
        return (
            f"{self.needs.alone:.1%} of the requests would miss a target even on an idle instance: no number of"
            " instances changes that"
        )

    def grid(self) -> Iterator[tuple[float, list[tuple[float, float | None, float | None]]]]:
        """The share of requests within multiples of the targets: for each multiple of that of the first token, for each
        of that between tokens, of the plain and of the split deployment."""
        for ttft in GRID:
            row: list[tuple[float, float | None, float | None]] = []
            for itl in GRID:
                targets = Targets(_times(self.targets.ttft, ttft), _times(self.targets.itl, itl), self.targets.e2e)
                plain, split = (None if one is None else one.within(targets) for one in (self.plain, self.split))
                row.append((itl, plain, split))
            yield ttft, row


def _times(target: float | None, factor: float) -> float | None:
    return None if target is None else target * factor


def _busiest(figures: ReplayFigures) -> str:
    return ", ".join(f"{role} {one.busy:.0%} busy" for role, one in figures.roles.items())


def busiest(arrivals: Sequence[Arrival], most: int) -> tuple[float, list[Arrival]]:
    """When the `most` requests in a row begin that come the fastest, and these, at times since then; all of a shorter
    trace."""
    most = min(most, len(arrivals))
    places = range(len(arrivals) - most + 1)
    first = min(places, key=lambda place: arrivals[place + most - 1].at_s - arrivals[place].at_s)
    first_s = arrivals[first].at_s
    return first_s, [replace(one, at_s=one.at_s - first_s) for one in arrivals[first : first + most]]
