"""`kvferry cache warm` with real instances, a router and an engine of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import ModelMaker
from kvferry.cli.cache.documents import Document
from kvferry.cli.cache.warming import Server, Warming
from kvferry.cli.main import main
from kvferry.core.messages.kept import KeptBlocks, TierShare
from kvferry.http.client.http_client import HttpClient
from kvferry.store import upkeep
from support.processes import KvferryProcess, cluster, kvferry, run
from support.waiting import until

pytestmark = pytest.mark.processes

TEXT = "The ferry carries the cache across the river. " * 12
ENGINE = (
    *("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16"),
    *("--max-num-batched-tokens=64", "--max-num-seqs=16"),
)


def warm(*arguments: object, code: int = 0, stdin: str = "") -> list[dict[str, Any]]:
    """What the command says, as JSON."""
    done = run("cache", "warm", *map(str, arguments), "--json", stdin=stdin)
    assert done.returncode == code, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout) if code < 2 else [{"error": done.stderr}]
    return found


def transfer(*stores: str, **more: Any) -> str:
    extra = {"store": list(stores), **more}
    return json.dumps({"kv_connector": "KVStoreConnector", "kv_connector_extra_config": extra})


@contextmanager
def instance(model: Path, log: Path, config: str | None, *more: str) -> Iterator[KvferryProcess]:
    given = () if config is None else (f"--kv-transfer-config={config}",)
    with kvferry("serve", str(model), *ENGINE, *given, *more, log=log) as running:
        yield running


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


def test_at_an_instance_all_tiers_have_it_pinned_and_prompts_that_begin_so_load_it(
    model_maker: ModelMaker, tmp_path: Path, document: Path
) -> None:
    folder, model = tmp_path / "store", model_maker("llama", max_position_embeddings=1024)
    lines = tmp_path / "more.jsonl"
    lines.write_text(
        json.dumps({"prompt": list(range(5, 105))}) + '\n\n{"prompt": [7, 8]}\n{"prompt": "a", "messages": []}\n'
    )
    config = transfer("memory:32MiB", f"file:{folder}", write="back")
    with instance(model, tmp_path / "log", config) as running:
        alone = running.complete(TEXT)
        [one] = warm(document, "--url", running.url)
        assert one["error"] is None
        assert one["num_kept"] == one["num_pinned"] == one["num_blocks"] > 10
        assert [tier["num_present"] for tier in one["tiers"]] == [one["num_blocks"]] * 2
        again, from_stdin = warm(document, "-", "--url", running.url, "--no-pin", stdin=TEXT)
        assert again["num_before"] == from_stdin["num_before"] == one["num_blocks"]
        [other] = warm(document, "--url", running.url, "--cache-salt", "a tenant")
        assert other["num_before"] == 0, "another tenant's was found"
        assert "either prompt" in warm(lines, "--url", running.url, code=2)[0]["error"]
        num_of_first_line = 100 // 16  # what comes before a line that is wrong is kept
        pinned = sum(entry.is_pinned for entry in upkeep.entries(folder))
        assert pinned == one["num_blocks"] + other["num_blocks"] + num_of_first_line
        [freed] = warm(document, "--url", running.url, "--unpin")
        assert (freed["error"], freed["num_kept"], freed["num_pinned"]) == (None, one["num_blocks"], 0)
        assert sum(entry.is_pinned for entry in upkeep.entries(folder)) == pinned - one["num_blocks"]
    with instance(model, tmp_path / "log2", transfer(f"file:{folder}")) as fresh:
        answer = fresh.complete(TEXT)
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert (
            fresh.metric("vllm:external_prefix_cache_hits_total")
            + fresh.metric("vllm:external_prefix_cache_hits_total")
            >= (one["num_blocks"] - 1) * 16
        )


def test_blocks_that_the_engine_has_and_the_store_has_lost_are_kept_again(
    model_maker: ModelMaker, tmp_path: Path, document: Path
) -> None:
    folder = tmp_path / "store"
    with instance(
        model_maker("llama", max_position_embeddings=1024), tmp_path / "log", transfer(f"file:{folder}")
    ) as running:
        [one] = warm(document, "--url", running.url)
        assert main(["cache", "rm", str(folder), "--all", "--pinned"]) == 0
        [two] = warm(document, "--url", running.url)
        assert two["num_before"] == 0
        assert two["num_kept"] == one["num_blocks"]


def test_behind_a_router_the_prefill_instances_keep_it(model_maker: ModelMaker, tmp_path: Path, document: Path) -> None:
    folder = tmp_path / "store"
    config = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{folder}"}}
    with cluster(
        model_maker("llama", max_position_embeddings=1024), tmp_path, transfer=config, engine=("--block-size=16",)
    ) as running:
        [one] = warm(document, "--url", running.router.url)
        assert one["num_pinned"] == one["num_blocks"] > 10
        assert "kv_consumer" in warm(document, "--url", running.decode[0].url, code=1)[0]["error"]


@pytest.mark.full
def test_with_an_engine_of_its_own_which_ends_with_it(model_maker: ModelMaker, tmp_path: Path, document: Path) -> None:
    folder, model = tmp_path / "store", str(model_maker("llama", max_position_embeddings=1024))
    own = ("--model", model, "--dtype", "float32", "--kv-cache-memory", "16MiB", "--block-size", "16")
    lines = tmp_path / "more.jsonl"
    lines.write_text(json.dumps({"prompt": TEXT * 20}) + '\n{"prompt": [7, 8]}\n{"prompt": [99999999]}\n')
    good, long, short, strange = warm(document, lines, *own, "--store", f"file:{folder}", code=1)
    assert good["num_pinned"] == good["num_blocks"] > 10
    assert "maximum context length" in long["error"]
    assert "less than a block of KV (16)" in short["error"]
    assert "out of vocabulary" in strange["error"]
    everything = psutil.process_iter(["cmdline"])  # which may end meanwhile
    assert not [one for one in everything if str(folder) in " ".join(one.info["cmdline"] or ())]


def test_its_own_engine_starts_quietly_and_says_in_one_line_why_it_does_not(
    model_maker: ModelMaker, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFERRY_VERBOSE", raising=False)
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    own = ("--model", str(model_maker("llama", max_position_embeddings=1024)), "--block-size=16")
    store = f"--store=file:{tmp_path}/store"
    done = run("cache", "warm", str(document), *own, store, "--kv-cache-memory=16MiB")
    assert done.returncode == 0, done.stderr
    *progress, ready = done.stderr.splitlines()
    assert ready.startswith("✓ both-0")
    assert all(line.startswith("· both-0") for line in progress)  # where the start takes long
    assert "pinned" in done.stdout
    done = run("cache", "warm", str(document), *own, store, "--kv-cache-memory=1KiB")
    line = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("kvferry: error: both-0: the KV cache needs at least two blocks")


def test_a_store_that_is_too_small_is_told(model_maker: ModelMaker, tmp_path: Path, document: Path) -> None:
    model, config = model_maker("llama", max_position_embeddings=1024), transfer(f"file:{tmp_path}/kv?max_bytes=40kB")
    with instance(model, tmp_path / "log", config) as running:
        [full] = warm(document, "--url", running.url, code=1)
        assert full["num_kept"] < full["num_blocks"]
        assert f"of {full['num_blocks']} blocks" in full["error"]


@pytest.mark.parametrize("num_present", [4, 3])
async def test_what_others_have_on_its_way_to_the_store_is_not_waited_for(num_present: int) -> None:
    """A busy instance always has something on its way: all blocks there, or no more coming, is the end."""
    pinned = []

    class Busy(Server):
        """Blocks are there once it has computed, and it is never settled."""

        computed = False

        async def ask(self, method: str, path: str, body: Any, answer_type: Any, timeout_s: float = 1.0) -> Any:
            if path == "/v1/completions":
                Busy.computed = True
                return {}
            pinned.append(body.get("pin"))
            num = num_present if Busy.computed else 0
            return KeptBlocks(
                num_tokens=8, block_size=2, num_blocks=4, tiers=[TierShare("0", num, num, True)], is_settled=False
            )

    async with HttpClient() as client:
        document = Document("d", {"prompt": [1] * 8})
        one = Warming(Busy(client, "http://127.0.0.1:1"), document, None, 60.0, lambda *_: None)
        one.stalled_s = 0.0
        outcome = await one.run(pin=True)
    assert (outcome.num_kept, outcome.error is None) == (num_present, num_present == 4)
    assert (pinned[-1] is True) == (num_present == 4)


def test_what_cannot_be_is_one_line(model_maker: ModelMaker, tmp_path: Path, document: Path) -> None:
    absent = tmp_path / "absent"
    for arguments, said in (
        ([absent, "--url", "http://127.0.0.1:1"], "is no file"),
        ([document], "give the --url of a running instance or router"),
        ([document, "--url", "http://127.0.0.1:1", "--store", "file:/x"], "--store is for an engine"),
        ([document, "--model", "m"], "one of them"),
        ([document, "--model", "m", "--store", "memry:1GiB"], "did you mean"),
        ([document, "--url", "http://127.0.0.1:1", "--admin-key", "a\nb"], "a line break"),
        (["--urk", document], "neither a flag"),
        (["-", "-", "--url", "http://127.0.0.1:1"], "only once"),
    ):
        assert said in warm(*arguments, code=2)[0]["error"]
    unreached = run("cache", "warm", str(document), "--url", "http://127.0.0.1:1")
    assert unreached.returncode == 1
    assert "127.0.0.1:1" in unreached.stderr
    with instance(model_maker("llama"), tmp_path / "log", None) as running:
        assert "no connector that keeps KV" in warm(document, "--url", running.url, code=1)[0]["error"]


def test_ctrl_c_ends_the_engine_too(model_maker: ModelMaker, tmp_path: Path, document: Path) -> None:
    store = f"file:{tmp_path}/store"
    command = [sys.executable, "-m", "kvferry.cli.main", "cache", "warm", str(document), "--store", store]
    command += ["--model", str(model_maker("llama"))]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        mine = psutil.Process(process.pid)
        until(lambda: bool(mine.children()), 60)
        started = mine.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_pins_that_have_no_room_are_told_with_the_reason(
    model_maker: ModelMaker, tmp_path: Path, document: Path
) -> None:
    config = transfer("memory:32MiB?pinned_share=0", f"file:{tmp_path}/kv?max_bytes=64MiB&pinned_share=0")
    with instance(model_maker("llama", max_position_embeddings=1024), tmp_path / "log", config) as running:
        [one] = warm(document, "--url", running.url, code=1)
        assert "pinned 0 of" in one["error"]
        assert "pinned_share" in one["error"]
        assert all("pins at most 0% of its room" in tier["refusal"] for tier in one["tiers"])
        assert one["num_kept"] == one["num_blocks"]
        [one] = warm(document, "--url", running.url, "--no-pin")
        assert one["error"] is None
