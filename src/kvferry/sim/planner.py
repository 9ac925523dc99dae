"""The search for the deployment that serves a trace within its targets: counts of P and D, plain instances, chunk sizes
and settings of the router.

An estimate from the times of steps excludes candidates that cannot keep up, and orders the others; the simulator
decides. The cheapest deployment that keeps the target share of requests within the targets is chosen, and compared with
the best of the other kind, as there may be no reason to disaggregate. Settings of the router are tried for the chosen
deployment.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvferry.core.settings.flags import to_flags
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
POLICIES = ("least_loaded", "prefix")
"""Policies that are tried besides `cost`; `prefix` only if prompts of the trace share prefixes."""
BETTER_SHARE, BETTER_TAIL = 0.005, 0.9
"""P/D is preferred to as many plain instances if its share of requests within the targets is larger by this much, or
equal with a tail below this share of theirs; likewise for other settings of the router and its defaults."""
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the targets of the goodput grid."""


@dataclass(frozen=True, order=True)
class RouterSettings:
    """The router settings that a plan chooses: `policy`, and `disaggregate_from` as in its flag."""

    policy: str = "cost"
    disaggregate_from: str = "auto"

    def values(self) -> dict[str, str]:
        """The settings other than the defaults, as keys of a spec."""
        default = vars(RouterSettings())
        return {name: value for name, value in vars(self).items() if value != default[name]}

    def flags(self) -> list[str]:
        """The same as flags of `kvferry router`."""
        return to_flags(self.values())


@dataclass(frozen=True, order=True)
class Candidate:
    """A deployment: numbers of instances, and the max number of tokens in a step of prefilling ones."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    chunk: int = PREFILL_CHUNK
    router: RouterSettings = RouterSettings()
    store_bytes: int = 0
    """Size of the store that all instances share; 0: there is none."""

    @property
    def num_instances(self) -> int:
        """Total number of instances."""
        return self.prefill + self.decode + self.both

    @property
    def is_split(self) -> bool:
        """True if prefill and decode are on different instances."""
        return bool(self.prefill)

    def __str__(self) -> str:
        instances = f"{self.prefill}P + {self.decode}D" if self.is_split else f"{self.both} plain"
        store = (f"a store of {to_size(self.store_bytes)}",) if self.store_bytes else ()
        return ", ".join((f"{instances}, chunks of {self.chunk}", *self.router.flags(), *store))


@dataclass(frozen=True)
class DeploymentResult:
    """The result of simulating a deployment."""

    candidate: Candidate
    figures: ReplayFigures
    completed_requests: tuple[CompletedRequest, ...]

    def within(self, targets: Targets) -> float:
        """Share of all requests that met these targets."""
        met = sum(
            targets.met_by(request.ttft_s, request.e2e_s, request.num_tokens) for request in self.completed_requests
        )
        return met / self.figures.requests

    def tail(self, targets: Targets) -> float:
        """The worst P99, as a multiple of its target; infinite if nothing was answered."""
        if not self.completed_requests:
            return math.inf
        pairs = (
            (targets.ttft, self.figures.ttft.p99),
            (targets.itl, self.figures.itl.p99),
            (targets.e2e, self.figures.e2e.p99),
        )
        return max((latency_s / target for target, latency_s in pairs if target), default=0.0)


@dataclass(frozen=True)
class Estimate:
    """The load of a trace, in instance seconds per second, from the times of steps alone. `alone`: share of the
    requests that would miss a target even on an idle instance; `too_long`: share that fits no instance.
    `min_instances`: lower bounds for keeping the share: for prefill, for decode, and for plain instances."""

    prefill_s: float
    decode_s: float
    alone: float
    too_long: float = 0.0
    min_instances: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def busy(self, candidate: Candidate) -> float:
        """Share of the time in which the busiest role computes; more than 1: it cannot keep up."""
        if candidate.is_split:
            return max(self.prefill_s / candidate.prefill, self.decode_s / candidate.decode)
        return (self.prefill_s + self.decode_s) / candidate.both

    def keeps_up(self, candidate: Candidate) -> bool:
        """True if each role has its min number of instances."""
        prefill, decode, both = self.min_instances
        if candidate.is_split:
            return prefill <= candidate.prefill and decode <= candidate.decode
        return both <= candidate.both


def estimate(arrivals: Sequence[Arrival], times: MachineTimes, targets: Targets, share: float = 1.0) -> Estimate:
    """A lower bound of the load of a trace: earlier blocks are not computed again, and as many sequences decode
    together as the inter-token target and the KV cache allow. `share`: target share of requests within the targets."""
    step, seen = times.step, set[int]()
    answers = sum(arrival.answer_tokens for arrival in arrivals)
    context = (
        sum((arrival.prompt_tokens + arrival.answer_tokens / 2) * arrival.answer_tokens for arrival in arrivals)
        / answers
    )
    sequence_s = step.decode_sequence_s + step.context_token_s * context
    num_together = min(times.max_num_seqs, max(1, int(times.kv.num_tokens / max(1.0, context))))
    if targets.itl is not None and sequence_s:
        num_together = max(1, min(num_together, int((targets.itl - step.base_s) / sequence_s)))
    token_s = step.base_s / num_together + sequence_s
    ttft_s, itl_s, e2e_s = (
        math.inf if target is None else target for target in (targets.ttft, targets.itl, targets.e2e)
    )
    prefills, decodes = list[tuple[float, float]](), list[tuple[float, float]]()
    num_late = num_too_long = 0
    for arrival in arrivals:
        num_cached_blocks = sum(1 for block in arrival.block_ids if block in seen)
        seen.update(arrival.block_ids)
        num_uncached = max(1, arrival.prompt_tokens - num_cached_blocks * BLOCK_TOKENS)
        seconds = prefill_seconds(step, num_uncached, PREFILL_CHUNK)
        prefills.append((arrival.at_s + min(ttft_s, e2e_s), seconds))
        decodes.append(
            (arrival.at_s + min(ttft_s + itl_s * arrival.answer_tokens, e2e_s), arrival.answer_tokens * token_s)
        )
        alone_ttft_s = seconds + 4 * times.transfer.latency_s
        step_s = step.base_s + step.decode_sequence_s + step.context_token_s * arrival.prompt_tokens
        num_late += not targets.met_by(
            alone_ttft_s, alone_ttft_s + step_s * (arrival.answer_tokens - 1), arrival.answer_tokens
        )
        num_too_long += arrival.prompt_tokens + arrival.answer_tokens > min(times.max_model_len, times.kv.num_tokens)
    misses = len(arrivals) - math.ceil(share * len(arrivals) - 1e-9)
    fewest = (
        _min_instances(prefills, misses),
        _min_instances(decodes, misses),
        _min_instances([*prefills, *decodes], 2 * misses),
    )
    span_s = max(arrivals[-1].at_s, 1.0) + (targets.ttft or 0.0)
    prefill_s, decode_s = (sum(seconds for _, seconds in jobs) / span_s for jobs in (prefills, decodes))
    return Estimate(prefill_s, decode_s, num_late / len(arrivals), num_too_long / len(arrivals), fewest)


def _min_instances(jobs: Iterable[tuple[float, float]], misses: int) -> float:
    """Min number of instances for all but `misses` of these jobs. Each is (deadline, instance seconds), and none begins
    before second 0."""
    longest: list[float] = []
    min_instances = required_s = 0.0
    for until_s, seconds in sorted(jobs):
        heapq.heappush(longest, seconds)
        if len(longest) > misses:
            required_s += heapq.heappop(longest)
        min_instances = max(min_instances, required_s / max(until_s, 1e-9))
    return min_instances


def candidates(number: int, needs: Estimate, times: MachineTimes, max_splits: int = 3) -> list[Candidate]:
    """Candidates of `number` instances that may keep up: all chunk sizes if plain, and the `max_splits` most balanced
    splits. No chunk is smaller than a full batch of decodes."""
    chunks = sorted({max(times.max_num_seqs, min(chunk, times.max_model_len)) for chunk in PLAIN_CHUNKS})
    plain = [Candidate(both=number, chunk=chunk) for chunk in chunks]
    return [
        candidate for candidate in (*plain, *_splits(number, needs, times)[:max_splits]) if needs.keeps_up(candidate)
    ]


def _splits(number: int, needs: Estimate, times: MachineTimes) -> list[Candidate]:
    """All divisions into P and D, the most balanced first."""
    chunk = max(times.max_num_seqs, PREFILL_CHUNK)
    return sorted((Candidate(count, number - count, chunk=chunk) for count in range(1, number)), key=needs.busy)


@dataclass
class Planner:
    """One search. `world_of` builds the deployment of a candidate; `share`: target share of requests within the
    targets."""

    arrivals: Sequence[Arrival]
    times: MachineTimes
    targets: Targets
    world_of: Callable[[Candidate], WorldSpec]
    share: float = 0.99
    seed: int = 0
    on_progress: Callable[[str, float], None] = lambda phase, share: None
    tried: dict[Candidate, DeploymentResult] = field(default_factory=dict)

    def search(self, budget: int) -> SearchResult:
        """The cheapest deployment of at most `budget` instances that keeps the share; the best one if none does."""
        needs = estimate(self.arrivals, self.times, self.targets, self.share)
        keeping = [n for n in range(1, budget + 1) if candidates(n, needs, self.times)]
        failed, number = 0, keeping[0] if keeping else budget
        while not self._holds(number, needs) and number < budget:
            failed, number = number, min(budget, number + max(1, number // 4))
        while number - failed > 1 and self._holds(number, needs):  # larger steps may have passed the smallest
            middle = (failed + number) // 2
            if not [number_kept for number_kept in keeping if number_kept <= middle]:
                break
            failed, number = (failed, middle) if self._holds(middle, needs) else (middle, number)
        return self._plan(number, needs)

    def with_store(self, result: SearchResult, num_bytes: int) -> SearchResult:
        """Try the chosen deployment with a store and, while it keeps the share, with fewer prefilling instances."""
        best = self._try(replace(result.chosen.candidate, store_bytes=num_bytes))
        while best.figures.within >= self.share and max(best.candidate.prefill, best.candidate.both) > 1:
            role = "prefill" if best.candidate.is_split else "both"
            fewer = self._try(replace(best.candidate, **{role: getattr(best.candidate, role) - 1}))
            if fewer.figures.within < self.share:
                break
            best = fewer
        return replace(result, with_store=best, tried=sorted(self.tried.values(), key=_order))

    def _router_variants(self, candidate: Candidate) -> list[Candidate]:
        """A deployment with one setting of its router changed. The fixed threshold is the median prompt's length."""
        if candidate.num_instances == 1:
            return []
        names = POLICIES if any(arrival.block_ids for arrival in self.arrivals) else POLICIES[:1]
        settings = [RouterSettings(policy=name) for name in names]
        if candidate.is_split:
            middle = sorted(arrival.prompt_tokens for arrival in self.arrivals)[len(self.arrivals) // 2]
            settings += [RouterSettings(disaggregate_from=threshold) for threshold in ("0", str(middle))]
        return [replace(candidate, router=router) for router in settings]

    def _holds(self, number: int, needs: Estimate) -> bool:
        """True if a deployment of `number` instances keeps the share."""
        return any(result.figures.within >= self.share for result in self._try_all(number, needs))

    def _try_all(self, number: int, needs: Estimate) -> list[DeploymentResult]:
        chosen = candidates(number, needs, self.times)
        if not chosen:  # the best of both kinds, to report how far off they are
            plain = Candidate(both=number, chunk=max(self.times.max_num_seqs, PREFILL_CHUNK))
            chosen = [plain, *_splits(number, needs, self.times)[:1]]
        return [self._try(candidate) for candidate in chosen]

    def _try(self, candidate: Candidate) -> DeploymentResult:
        if candidate not in self.tried:
            replay = TraceReplay(self.world_of(candidate), self.arrivals, seed=self.seed)
            figures = replay.run(self.targets, lambda done: self.on_progress(str(candidate), done))
            self.tried[candidate] = DeploymentResult(candidate, figures, tuple(replay.completed_requests))
        return self.tried[candidate]

    def _plan(self, number: int, needs: Estimate) -> SearchResult:
        at = [result for result in self._try_all(number, needs) if result.candidate.num_instances == number]
        plain = self._best(result for result in at if not result.candidate.is_split)
        split = self._best(result for result in at if result.candidate.is_split)
        plan = SearchResult(self.targets, self.share, needs, plain, split)
        by_router = [plan.by_kind, *(self._try(result) for result in self._router_variants(plan.by_kind.candidate))]
        return replace(plan, by_router=by_router, tried=sorted(self.tried.values(), key=_order))

    def _best(self, results: Iterable[DeploymentResult]) -> DeploymentResult | None:
        return max(results, key=lambda result: (result.figures.within, -result.tail(self.targets)), default=None)


def _order(result: DeploymentResult) -> tuple[int, bool, Candidate]:
    return result.candidate.num_instances, result.candidate.is_split, result.candidate


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the best plain and the best split deployment of the chosen number of instances."""

    targets: Targets
    share: float
    needs: Estimate
    plain: DeploymentResult | None
    split: DeploymentResult | None
    by_router: list[DeploymentResult] = field(default_factory=list)
    """The better of the two, also with other settings of the router."""
    tried: list[DeploymentResult] = field(default_factory=list)
    """All deployments that were simulated, by their number of instances."""
    with_store: DeploymentResult | None = None
    """The chosen deployment with a store, and with the fewest instances; None: no store was tried."""

    @property
    def chosen(self) -> DeploymentResult:
        """The recommended deployment: with a store only if that needs fewer instances, or is clearly better."""
        stored, without = self.with_store, self.without_store
        if stored is None:
            return without
        is_smaller = stored.candidate.num_instances < without.candidate.num_instances
        return stored if is_smaller or self._is_better(stored, without) else without

    @property
    def without_store(self) -> DeploymentResult:
        """The recommendation without a store: other router settings only if they are clearly better than the
        defaults."""
        best = self.by_kind
        for result in self.by_router[1:]:
            if self._is_better(result, best):
                best = result
        return best

    @property
    def by_kind(self) -> DeploymentResult:
        """The better one, plain or split, with the router's own settings."""
        if self.plain is None or self.split is None:
            only = self.split or self.plain
            assert only is not None, "every number of instances has a candidate"
            return only
        return self.split if self._is_better(self.split, self.plain) else self.plain

    def _is_better(self, result: DeploymentResult, other: DeploymentResult) -> bool:
        gain = result.figures.within - other.figures.within
        keeps = result.figures.within >= self.share
        if keeps != (other.figures.within >= self.share):
            return keeps
        if abs(gain) >= BETTER_SHARE:
            return gain > 0
        return result.tail(self.targets) < BETTER_TAIL * other.tail(self.targets)

    @property
    def holds(self) -> bool:
        """True if the chosen deployment keeps the share."""
        return self.chosen.figures.within >= self.share

    def reason(self) -> str:
        """The reason to disaggregate or not, in numbers: both with the router's default settings."""
        chosen = self.by_kind
        head = "disaggregate" if chosen.candidate.is_split else "do not disaggregate"
        other = self.plain if chosen.candidate.is_split else self.split
        description = self._about(chosen)
        if other is None:
            reason = (
                "one instance cannot be divided"
                if chosen.candidate.num_instances == 1
                else "the other way cannot keep up by the times of its steps"
            )
            return f"{head}: {description}; {reason}"
        return f"{head}: {description}; with as many instances, {self._about(other)}"

    def router_reason(self) -> str:
        """The reason for the settings of the router, in numbers; empty for one instance, where nothing is chosen."""
        chosen, default = self.without_store, self.by_kind
        if len(self.by_router) < 2:
            return ""
        others = "; ".join(self._by_router(result) for result in self.by_router if result is not chosen)
        return f"router: {self._by_router(chosen)}; {'not better' if chosen is default else 'before'}: {others}"

    def store_reason(self) -> str:
        """The reason for or against a store, in numbers; empty if none was tried."""
        if self.with_store is None:
            return ""
        head = "a store" if self.chosen is self.with_store else "no store"
        return f"{head}: {self._about(self.with_store)}; without, {self._about(self.without_store)}"

    def _by_router(self, result: DeploymentResult) -> str:
        figures, flags = result.figures, " ".join(result.candidate.router.flags()) or "its own settings"
        times = f"P99 {figures.ttft.p99 * 1e3:.0f} ms and {figures.itl.p99 * 1e3:.1f} ms"
        return f"{flags} ({percent(figures.within)}%, {times})"

    def _about(self, result: DeploymentResult) -> str:
        figures = result.figures
        if not result.completed_requests:
            return f"{result.candidate} answer no request ({', '.join(figures.reasons)})"
        return (
            f"{result.candidate} keep {percent(figures.within)}% within {self.targets} (P99:"
            f" {figures.ttft.p99 * 1e3:.0f} ms to the first token, {figures.itl.p99 * 1e3:.1f} ms between tokens;"
            f" {_busiest(figures)})"
        )

    def unreachable(self) -> str:
        """The reason why no number of instances is enough; empty if unknown."""
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
        """The shares of requests within multiples of the targets, for the plain and the split deployment: a row for
        each multiple of the first-token target, an entry for each multiple of the inter-token target."""
        for ttft in GRID:
            row: list[tuple[float, float | None, float | None]] = []
            for itl in GRID:
                targets = Targets(_times(self.targets.ttft, ttft), _times(self.targets.itl, itl), self.targets.e2e)
                plain, split = (
                    None if result is None else result.within(targets) for result in (self.plain, self.split)
                )
                row.append((itl, plain, split))
            yield ttft, row


def _times(target: float | None, factor: float) -> float | None:
    return None if target is None else target * factor


def _busiest(figures: ReplayFigures) -> str:
    return ", ".join(f"{role} {role_figures.busy:.0%} busy" for role, role_figures in figures.roles.items())


def busiest(arrivals: Sequence[Arrival], max_requests: int) -> tuple[float, list[Arrival]]:
    """The start of the fastest `max_requests` consecutive requests, and these requests at times since then; all of a
    shorter trace."""
    max_requests = min(max_requests, len(arrivals))
    starts = range(len(arrivals) - max_requests + 1)
    first = min(starts, key=lambda start: arrivals[start + max_requests - 1].at_s - arrivals[start].at_s)
    start_s = arrivals[first].at_s
    return start_s, [
        replace(arrival, at_s=arrival.at_s - start_s) for arrival in arrivals[first : first + max_requests]
    ]
