"""Which vLLM is taken. Runs without vLLM."""

from __future__ import annotations

import pytest

from kvferry.adapters.vllm.versions import OVERRIDE, TESTED, release_line, require_tested
from kvferry.core.errors import ConfigError


def test_tested_versions_pass() -> None:
    for line in TESTED:
        require_tested(f"{line}.1+cpu")


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    with pytest.raises(ConfigError, match=rf"0\.99\.0.*{OVERRIDE}=1"):
        require_tested("0.99.0")


def test_the_brave_may(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    require_tested("0.99.0")
    assert "never tested" in caplog.text


@pytest.mark.parametrize(("version", "line"), [("0.32.0+cpu", "0.32"), ("0.32.1rc2.dev3", "0.32"), ("dev", "dev")])
def test_release_line(version: str, line: str) -> None:
    assert release_line(version) == line
