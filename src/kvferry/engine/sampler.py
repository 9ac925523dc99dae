"""Chooses the next token of each sequence from its logits.

Greedy sampling takes the most likely token. Otherwise one uniform random number, a function of (seed, position) only,
picks from the cumulative distribution in token order. So the token does not depend on the other sequences of the
batch, on preemption, or on which instance samples it. Order of adjustments (vLLM's): bias, minimum length, penalties,
temperature, min_p, top_k, top_p. Log-probabilities are computed before these adjustments. At the extremes that the API
accepts, each of temperature, min_p, top_k and top_p leaves the most likely token.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from kvferry.core.errors import InvalidRequest, LogitsNotFinite
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.sampling import MIN_LOGPROB, SamplingParams, banned_tokens, uniform_draw
from kvferry.core.structured_outputs import Matcher
from kvferry.engine.ops.most_likely import Bits, exclusions, most_likely_permitted
from kvferry.engine.scheduling.sequence import Sequence
from kvferry.engine.scheduling.step import SampledToken

logger = logging.getLogger(__name__)

NOT_CONSTRAINED: Mapping[str, Bits] = {}
MIN_TEMPERATURE = 1e-300
"""Lower temperatures count as this one: they are close to zero even in float64, and any two different logits are
infinitely far apart long before."""


def sample(
    logits: Tensor,
    sequences: abc.Sequence[Sequence],
    eos_token_ids: frozenset[int],
    permitted: Mapping[str, Bits] = NOT_CONSTRAINED,
) -> list[SampledToken]:
    """One token for each row of logits [R, vocab], float32. `sequences[r]`: the sequence of row r. `permitted`: by
    request id, the tokens that its grammar permits.

    Raises `LogitsNotFinite` if a row has no usable logits, `InvalidRequest` if the settings leave no token.
    """
    require_finite(logits)
    tokens = _most_likely(logits)
    adjusting = []
    for row, sequence in enumerate(sequences):
        if _adjusts(sequence):
            mask = permitted.get(sequence.request_id)
            token = _choose_permitted(logits, row, tokens[row], sequence, mask, eos_token_ids)
            if token is None:
                adjusting.append(row)
            else:
                tokens[row] = token
    adjusted = _adjust_rows(logits, adjusting, sequences, eos_token_ids, permitted) if adjusting else logits
    if adjusting:
        for row, token in zip(adjusting, _most_likely(adjusted[adjusting]), strict=True):
            tokens[row] = token
    random = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
    if random:
        drawn = _draw(adjusted[random], [sequences[row] for row in random])
        for row, token in zip(random, drawn.tolist(), strict=True):
            tokens[row] = token
    return [
        SampledToken(token, _sampled_logprobs(logits[row], token, sequences[row].request.sampling))
        for row, token in enumerate(tokens)
    ]


def verify(
    logits: Tensor, sequence: Sequence, first: SampledToken, draft: abc.Sequence[int], eos_token_ids: frozenset[int]
) -> list[SampledToken]:
    """The tokens after `first`, as far as they can be drawn: each one needs the logits after the token before it, and
    those are of the draft. logits [len(draft), vocab]: after each token of the draft. Never raises: what cannot be
    drawn here is drawn, or fails, in the next step."""
    tokens, num_known = [first], len(sequence.tokens)
    matcher = None if sequence.matcher is None else sequence.matcher.copy()
    try:
        for row, guess in zip(logits, draft, strict=True):
            if tokens[-1].token_id != guess:
                break
            sequence.tokens.append(guess)
            permitted = None
            if matcher is not None:
                matcher.accept(guess)
                if matcher.is_complete:
                    break
                permitted = permitted_tokens(matcher, len(row))
            masks = NOT_CONSTRAINED if permitted is None else {sequence.request_id: permitted}
            tokens += sample(row.unsqueeze(0), [sequence], eos_token_ids, masks)
    except Exception:
        logger.debug("a draft of request %s is verified in part", sequence.request_id, exc_info=True)
    finally:
        del sequence.tokens[num_known:]
    return tokens[1:]


def permitted_tokens(matcher: Matcher, vocab_size: int) -> Bits:
    """The tokens that a grammar permits next. Raises `GrammarFailed`."""
    bits = matcher.permitted()[: -(-vocab_size // 8)]
    bits[-1] &= 0xFF >> -vocab_size % 8  # a tokenizer may have more tokens than the model
    return bits


def _most_likely(logits: Tensor) -> list[int]:
    """The first of the largest logits of each row [R, vocab]. On CPUs, numpy's takes a tenth of the time of torch's."""
    tokens = logits.numpy().argmax(axis=-1) if logits.is_cpu else logits.argmax(dim=-1)
    return cast("list[int]", tokens.tolist())


def _choose_permitted(
    logits: Tensor,
    row: int,
    most_likely: int,
    sequence: Sequence,
    permitted: Bits | None,
    eos_token_ids: frozenset[int],
) -> int | None:
    """The most likely permitted token of a row [R, vocab], where nothing but a grammar matters to a greedy choice;
    None: its logits have to be adjusted. `most_likely`: of all tokens."""
    sampling = sequence.request.sampling
    if permitted is None or sampling.temperature > 0 or _reweighs(sampling):
        return None
    permitted = _without_banned(permitted, sequence, eos_token_ids)
    if permitted[most_likely >> 3] >> (most_likely & 7) & 1:
        return most_likely
    return most_likely_permitted(logits[row], permitted) if logits.is_cpu else None


def require_finite(logits: Tensor) -> None:
    """Raise `LogitsNotFinite` if a row of logits [.., vocab] contains a NaN or has an infinite maximum. Single logits
    may be minus infinity: some models rule tokens out in this way."""
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise LogitsNotFinite(
            "the model computed logits that are not finite for this prompt; its number format may be too narrow"
            " (--dtype float32) or its weights damaged"
        )


def _adjust_rows(
    logits: Tensor,
    rows: list[int],
    sequences: abc.Sequence[Sequence],
    eos_token_ids: frozenset[int],
    permitted: Mapping[str, Bits],
) -> Tensor:
    """A copy of logits [R, vocab] with these rows adjusted. Raises `InvalidRequest` if one has no token left."""
    adjusted = logits.clone()
    for row in rows:
        sequence = sequences[row]
        adjust_logits(adjusted[row], sequence, eos_token_ids, permitted.get(sequence.request_id))
    if bool((adjusted[rows].amax(dim=-1) == float("-inf")).any()):
        raise InvalidRequest(
            "min_tokens, stop tokens, allowed_token_ids, bad_words and structured output leave no token to choose",
            param="min_tokens",
        )
    return adjusted


def _sampled_logprobs(logits: Tensor, token_id: int, sampling: SamplingParams) -> TokenLogprobs | None:
    return token_logprobs(logits, token_id, sampling.logprobs, sampling.logprob_token_ids)


def token_logprobs(
    logits: Tensor, token_id: int, num_top: int | None, token_ids: abc.Sequence[int] = ()
) -> TokenLogprobs | None:
    """The log-probabilities of one position, with the `num_top` most likely tokens (None: no log-probabilities);
    logits [vocab]. `token_ids`: the tokens to return after the position's own, instead of the most likely ones. Raises
    `LogitsNotFinite`."""
    if num_top is None:
        return None
    require_finite(logits)
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    if token_ids:
        ids = torch.tensor([token_id, *token_ids], device=logprobs.device)
        values = logprobs[ids]
    else:
        values, ids = logprobs.topk(num_top)
    values = values.clamp_min(MIN_LOGPROB)  # tickets are JSON, which has no infinity
    return TokenLogprobs(token_id, float(chosen), rank, dict(zip(ids.tolist(), values.tolist(), strict=True)))


def _adjusts(sequence: Sequence) -> bool:
    """True if something but its temperature decides about the sequence's next token."""
    sampling = sequence.request.sampling
    return _reweighs(sampling) or sequence.num_output_tokens < sampling.min_tokens or sequence.matcher is not None


def _reweighs(sampling: SamplingParams) -> bool:
    """True if bias, penalties or lists of tokens change logits."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
    )


def adjust_logits(
    logits: Tensor, sequence: Sequence, eos_token_ids: frozenset[int], permitted: Bits | None = None
) -> None:
    """Apply what excludes tokens, bias, minimum length and penalties in place; logits [vocab]. `permitted`: the tokens
    that the sequence's grammar permits."""
    sampling = sequence.request.sampling
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sampling.allowed_token_ids, device=logits.device, dtype=torch.long)
        excluded = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        excluded[allowed] = False
        logits.masked_fill_(excluded, float("-inf"))
    if sampling.bad_words:
        logits[completions_of(sampling.bad_words, sequence)] = float("-inf")
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    if permitted is not None:
        logits.add_(exclusions(_without_banned(permitted, sequence, eos_token_ids), logits))
    elif sequence.num_output_tokens < sampling.min_tokens:
        banned = banned_tokens(sampling, eos_token_ids)
        logits[[token for token in banned if 0 <= token < len(logits)]] = float("-inf")
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=logits.device)
        seen_logits = logits[seen]
        logits[seen] = torch.where(
            seen_logits > 0, seen_logits / sampling.repetition_penalty, seen_logits * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        answer = torch.tensor(sequence.tokens[sequence.num_prompt_tokens :], device=logits.device, dtype=torch.long)
        ids, counts = answer.unique(return_counts=True)
        logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _without_banned(permitted: Bits, sequence: Sequence, eos_token_ids: frozenset[int]) -> Bits:
    """The permitted tokens that `min_tokens` and `ignore_eos` leave. A grammar that permits nothing else ends
    the answer nevertheless."""
    sampling = sequence.request.sampling
    banned = banned_tokens(sampling, eos_token_ids) if sequence.num_output_tokens < sampling.min_tokens else set()
    masks = [
        (token >> 3, 1 << (token & 7))
        for token in (banned | eos_token_ids if sampling.ignore_eos else banned)
        if 0 <= token < 8 * len(permitted)
    ]
    if not any(permitted[index] & mask for index, mask in masks):
        return permitted
    others = permitted.copy()
    for index, mask in masks:
        others[index] &= 0xFF ^ mask
    return others if others.max() else permitted


def completions_of(bad_words: abc.Sequence[tuple[int, ...]], sequence: Sequence) -> list[int]:
    """The tokens that would complete one of the token sequences in the answer."""
    tokens, first = sequence.tokens, sequence.num_prompt_tokens
    begins = ((word, len(tokens) - len(word) + 1) for word in bad_words)
    return [word[-1] for word, begin in begins if begin >= first and tuple(tokens[begin:]) == word[:-1]]


def _draw(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
    """Sample tokens [R] from logits [R, vocab]."""
    settings = [sequence.request.sampling for sequence in sequences]
    # Relative to the largest and in float64: only logits of tokens without a chance overflow, to minus infinity.
    logits = logits.double()
    temperatures = _column([max(setting.temperature, MIN_TEMPERATURE) for setting in settings], logits)
    logits = keep_likely(((logits - logits.amax(dim=-1, keepdim=True)) / temperatures).float(), settings)
    # float64: rounding in the cumulative sum must stay far below the probabilities of single tokens.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    draws = [uniform_draw(sequence.seed, len(sequence.tokens)) for sequence in sequences]
    targets = _column(draws, cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def keep_likely(logits: Tensor, settings: abc.Sequence[SamplingParams]) -> Tensor:
    """Logits [R, vocab] with all tokens that min_p, top_k or top_p of their row exclude at minus infinity."""
    if any(setting.min_p > 0 for setting in settings):
        floors = _column([setting.min_p for setting in settings], logits)
        probabilities = logits.softmax(dim=-1)
        lowest = probabilities.amax(dim=-1, keepdim=True) * floors
        logits = logits.masked_fill(probabilities < lowest, float("-inf"))
    if all(setting.top_k <= 0 and setting.top_p >= 1 for setting in settings):
        return logits
    vocab = logits.shape[-1]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    limits = _column([min(setting.top_k, vocab) if setting.top_k > 0 else vocab for setting in settings], logits)
    ordered = ordered.masked_fill(ranks >= limits, float("-inf"))
    # The token that reaches top_p is included, so the mass before each token decides.
    before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
    masses = _column([setting.top_p for setting in settings], logits)
    ordered = ordered.masked_fill((before >= masses) & (masses < 1) & (ranks > 0), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(1, ids, ordered)


def _column(values: abc.Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
