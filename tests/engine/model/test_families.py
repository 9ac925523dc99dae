"""Every family of transformers is exact or refused, as docs/models.md says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import transformers

from support.families import CannotBuildSmall, Case, cases, make_config
from support.models_page import PAGE, read, render, version_of
from support.sweep import Outcome, try_case

# One of each kind of thing a family may do; the others are part of the full matrix.
SHORT_RUN = {
    "apertus", "bert", "bloom", "cohere2", "ctrl", "falcon", "gemma3_text", "gpt2", "gpt_neox", "llama4_text",
    "longcat_flash", "mamba", "minicpm3", "moshi", "opt norms after", "phimoe", "qwen2_moe window",
    "smollm3 some layers unrotated", "zaya",
}  # fmt: skip


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in SHORT_RUN else pytest.mark.full)


@pytest.fixture(scope="module")
def told() -> dict[str, Outcome]:
    return read(PAGE.read_text())


@pytest.mark.parametrize("case", [_marked(case) for case in cases()])
def test_a_family_is_exact_or_refused(case: Case, told: dict[str, Outcome], tmp_path: Path) -> None:
    outcome = try_case(case, tmp_path)
    assert outcome.kind != "wrong", outcome.reason
    # what transformers itself builds small may depend on what else is installed
    if version_of(PAGE.read_text()) == transformers.__version__ and told[case.name].kind != "not tried":
        assert outcome == told[case.name], "docs/models.md says otherwise; scripts/make_models_page makes it anew"


def test_the_page_is_of_these_cases_and_as_it_was_made(told: dict[str, Outcome]) -> None:
    text = PAGE.read_text()
    if version_of(text) == transformers.__version__:
        assert {case.name for case in cases()} == set(told)
    assert render(told, version_of(text)) == text
    assert sum(outcome.kind == "exact" for outcome in told.values()) >= 100


def test_cases_are_not_the_same_by_another_name() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    configurations: dict[str, str] = {}
    for case in cases():
        with contextlib.suppress(CannotBuildSmall):
            configuration = repr((case.family, make_config(case).to_dict()))
            assert configurations.setdefault(configuration, case.name) == case.name
