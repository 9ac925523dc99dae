"""What `make demo` shows."""

import signal
import subprocess
import sys

import pytest

from kvferry.cli.demo.command import LONG_PROMPTS

pytestmark = pytest.mark.processes
DEMO = [sys.executable, "-m", "kvferry.cli.main", "demo"]


def test_the_demo_ends_by_itself_and_finds_every_token_equal() -> None:
    done = subprocess.run(DEMO, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 192 tokens equal a plain instance's" in done.stdout
    assert "transfer" in done.stdout
    assert done.stdout.count("▲") == 2 * len(LONG_PROMPTS) + 1, "each long prompt has its mark, and the marks a legend"
    assert "Longest gap between two tokens" in done.stdout
    assert (done.stdout + done.stderr).lower().count("stopping everything") == 1


@pytest.mark.full
def test_kept_it_serves_until_ctrl_c() -> None:
    with subprocess.Popen([*DEMO, "--keep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert any("Still serving at http://127.0.0.1:" in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
