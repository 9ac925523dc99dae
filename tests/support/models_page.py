"""docs/models.md: written from the outcomes of the sweep, and read back by the test that compares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from support.families import Case, cases
from support.sweep import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
AS_IT_IS = "as it is"

_HEAD = """\
# Models

kvferry runs transformers' own modelling code with its own paged attention, so it knows no family by name. What does not
run exactly is refused at start, in one line that says why.

This page is made by `scripts/make_models_page`, which tries every decoder-only family of transformers {version} that
can be built small, with random weights in float32: eight prompts at once, in chunks of 24 tokens and blocks of 4, with
shared prefixes, twice (the second time from the prefix cache), across windows of 8 tokens and a trained context of 32,
greedy. *Exact* means that every token is the one that the model's own `generate()` gives for each prompt alone.
`make test-all` tries them all again and compares with this page.

{exact} configurations are exact, {refused} are refused, none is wrong. {not_tried} could not be tried.

## What is checked at start

- The configuration, before any weight is read: kinds of layers, and whether attention can be ours.
- The weights: what is missing, left over or of another shape is named, and nothing is filled with random numbers.
- The masks that the model builds, position by position around each border, up to its last position. They say what a
  layer sees: some families have a window in the mask only.
- Logits: short sequences in one batch, in chunks, over a shared prefix and token by token, against the model's own
  attention on each alone; also at every length that the configuration names (trained context, last position), and with
  windows made small, so that they are crossed.
- That the model computes the same with its own cache as without. Where it does not, there is no right answer.

## Sequences beyond the trained context

`longrope` (Phi-3, Phi-3.5, Phi-4-mini, PhiMoE) has other rotary factors for sequences longer than
`original_max_position_embeddings`. transformers chooses by the longest sequence of a batch; kvferry by each sequence
alone, so neither another's prompt nor a chunk size changes an answer. An answer that grows across the border is
computed anew from its first token, once: so does Phi-3's own `generate()`, and it is what the model's forward gives for
the whole sequence. `generate()` of other families with `longrope` keeps keys of the short factors among those of the
long ones; kvferry does not reproduce that, but what the forward gives. KV of the two kinds has different names, in the
prefix cache as in a store, and a hand-off whose sides stand on different sides of the border is computed anew.

Dynamic NTK scaling would begin beyond `max_position_embeddings`, where every sequence ends here.
"""


def render(outcomes: Mapping[str, Outcome], version: str) -> str:
    """The page; `outcomes` by name of case."""
    kinds = {kind: sum(one.kind == kind for one in outcomes.values()) for kind in ("exact", "refused", "not tried")}
    head = _HEAD.format(version=version, exact=kinds["exact"], refused=kinds["refused"], not_tried=kinds["not tried"])
    exact = [
        f"| {case.family} | {case.option or 'as it is'} |" for case in cases() if outcomes[case.name].kind == "exact"
    ]
    return "\n".join(
        [
            *(head, "## Exact", "", "| family | configuration |", "|---|---|", *sorted(exact)),
            *("", "## Refused", "", "| configuration | why |", "|---|---|", *_reasons(outcomes, "refused")),
            *("", "## Not tried", "", "| configuration | why |", "|---|---|", *_reasons(outcomes, "not tried"), ""),
        ]
    )


def _reasons(outcomes: Mapping[str, Outcome], kind: str) -> list[str]:
    return sorted(
        f"| {name} | {outcome.why.replace('|', '/')} |" for name, outcome in outcomes.items() if outcome.kind == kind
    )


def read(text: str) -> dict[str, Outcome]:
    """The outcomes that the page tells."""
    found = {}
    parts = iter(re.split(r"^## (Exact|Refused|Not tried)$", text, flags=re.MULTILINE)[1:])
    for section, body in zip(parts, parts, strict=True):
        for first, second in re.findall(r"^\| (.+?) \| (.*) \|$", body, flags=re.MULTILINE)[1:]:
            if section == "Exact":
                found[Case(first, "" if second == AS_IT_IS else second).name] = Outcome("exact")
            else:
                found[first] = Outcome("refused" if section == "Refused" else "not tried", second)
    return found


def version_of(text: str) -> str:
    """The release of transformers that the page is of."""
    match = re.search(r"of transformers (\S+) that", text)
    assert match is not None
    return match[1]
