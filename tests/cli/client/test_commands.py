"""`ask`, `chat`, `bench`, `trace record`, `status`, `doctor` and `top` as a person runs them, beside one fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.sim.traffic import read_traffic
from support.processes import AUTH_TOKEN, Cluster, cluster, kvferry

pytestmark = pytest.mark.processes

TINY = Path("kvferry/tiny-python")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(TINY, tmp_path_factory.mktemp("fleet")) as running:
        yield running


def run(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVFERRY_AUTH_TOKEN": AUTH_TOKEN, **more}
    command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
    return subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def test_ask_prints_the_answer_and_where_its_time_went(fleet: Cluster) -> None:
    done = run("ask", fleet.router.url, "def add(a, b):", "--max-tokens=24")
    assert done.returncode == 0, done.stderr
    body = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 24, "temperature": 0}
    expected = fleet.router.post("/v1/chat/completions", body).json()
    assert done.stdout == expected["choices"][0]["message"]["content"] + "\n"
    figures, gaps, phases = done.stderr.splitlines()
    assert figures.startswith("  TTFT ")
    assert figures.endswith("prefill-0 → decode-0")
    assert set(gaps.strip()) <= set("▁▂▃▄▅▆▇█")
    assert "prefill " in phases
    assert "hand-off " in phases
    assert all(len(line) <= 80 for line in done.stderr.splitlines())


def test_a_prompt_from_standard_input_and_wrong_addresses(fleet: Cluster) -> None:
    assert run("ask", fleet.router.url, "--max-tokens=4", stdin="class Foo:").returncode == 0
    wrong = run("ask", "http://127.0.0.1:1", "hello")
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1
    unknown = run("ask", fleet.router.url, "hello", "--model=nowhere")
    assert unknown.returncode == 2
    assert "it serves m" in unknown.stderr


def test_chat_answers_line_by_line(fleet: Cluster) -> None:
    done = run("chat", fleet.router.url, "--max-tokens=8", "--temperature=0", stdin="def a():\n\ndef b():\n")
    assert done.returncode == 0
    assert done.stderr.count("TTFT ") == 2
    assert done.stderr.startswith(f"m at {fleet.router.url}. ")


def test_bench_reports_both_ways_and_a_recorded_trace_can_be_sent_again(fleet: Cluster, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    load = ("--rate=4", "--for-s=2", "--prompt-tokens=200", "--answer-tokens=8")
    done = run("bench", fleet.router.url, *load, "--compare", "--json", f"--plot={plot}")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert set(results) == {"as it is", "aggregated"}
    for figures in results.values():
        assert figures["failed"] == 0
        assert figures["ttft_ms"]["p50"] > 0
        assert figures["output_tokens_per_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    recorded = run("trace", "record", fleet.router.url, "--for-s=1", "--before-s=3600")
    assert recorded.returncode == 0, recorded.stderr
    trace = tmp_path / "trace.csv"
    trace.write_text(recorded.stdout)
    arrivals = read_traffic(trace)
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    assert sum(arrival.prompt_tokens == 200 and arrival.answer_tokens == 8 for arrival in arrivals) >= 2
    again = run("bench", fleet.router.url, f"--trace={trace}", "--speed=50")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "goodput" in again.stdout
    assert all(len(line) <= 80 for line in again.stdout.splitlines())


def test_status_checks_every_instance(fleet: Cluster) -> None:
    done = run("status", fleet.router.url)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("check ✓") == 2
    shown = json.loads(run("status", fleet.router.url, "--json").stdout)
    assert [view["role"] for view in shown[0]["instances"]] == ["prefill", "decode"]
    gone = run("status", "http://127.0.0.1:1")
    assert gone.returncode == 1
    assert "✗" in gone.stdout


def test_a_stranger_sees_the_instances_and_how_to_have_them_checked(fleet: Cluster) -> None:
    done = run("status", fleet.router.url, KVFERRY_AUTH_TOKEN="the token of another deployment")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("not checked") == 2
    assert "KVFERRY_AUTH_TOKEN" in done.stdout
    assert all(process.url not in done.stdout for process in (*fleet.prefill, *fleet.decode))


def test_status_and_doctor_name_what_is_down_behind_a_router(tmp_path: Path) -> None:
    with kvferry(
        "router", "--prefill-url=http://127.0.0.1:1", "--decode-url=http://127.0.0.1:2", log=tmp_path / "log"
    ) as router:
        done = run("status", router.url)
        assert done.returncode == 1
        assert [line.split()[:3] for line in done.stdout.splitlines() if "-0" in line] == [
            ["P", "prefill-0", "down"],
            ["D", "decode-0", "down"],
        ]
        found = run("doctor", router.url, "--json")
        assert found.returncode == 1
        by_text = {finding["text"]: finding["remedy"] for finding in json.loads(found.stdout)}
        assert by_text[f"{router.url}: 1 P, 1 D, 0 up"] == f"kvferry status {router.url}"
        assert "nothing is handed off: no prefill instance is up" in by_text


def test_doctor_measures_what_hand_offs_carry(fleet: Cluster, tmp_path: Path) -> None:
    bundle, secret = tmp_path / "bundle.zip", "a-very-secret-key"
    done = run("doctor", fleet.router.url, f"--bundle={bundle}", KVFERRY_INSTANCE_API_KEY=secret)
    assert "1 P, 1 D, 2 up" in done.stdout, done.stdout + done.stderr
    assert "over shm (3 hand-offs of " in done.stdout.replace("\n  ", " ")
    assert bundle.stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(bundle) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "over shm" in texts["findings.txt"]
    assert "KVFERRY_INSTANCE_API_KEY=(removed)" in texts["variables.txt"]
    assert all(secret not in text and AUTH_TOKEN not in text for text in texts.values())


def test_top_reads_the_metrics_of_an_instance_without_a_page(fleet: Cluster) -> None:
    done = run("top", fleet.decode[0].url, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["kind"] == "instance"
    assert shown["instances"][0]["engine"] == "kvferry"
    assert "running" in shown["instances"][0]
